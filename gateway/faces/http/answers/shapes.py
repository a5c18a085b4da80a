"""The two endpoints' answers, whole and as chunks. One class an endpoint, one method a shape."""

from collections.abc import Sequence
from typing import Protocol

from gateway.faces.http.answers.logprobs import (
    Columns,
    Entry,
    chat_logprobs,
    joined,
    prompt_logprobs,
)
from gateway.faces.http.schema import ChatBody, CompletionBody
from gateway.requests.text import Text
from gateway.sessions.call import ClientCall
from gateway.sessions.session import ChoiceChunk, Logprob
from services.core import FinishReason

NOTHING: Entry = {}


class Shape(Protocol):
    """How an endpoint spells ids, objects and choices."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    def whole(self, parts: Sequence[ChoiceChunk]) -> Entry:
        """A finished choice, from all its chunks."""
        ...

    def part(self, chunk: ChoiceChunk) -> Entry:
        """A choice within a stream."""
        ...

    def around_whole(self, parts: Sequence[Sequence[ChoiceChunk]]) -> Entry:
        """What stands beside the choices of a whole answer."""
        ...

    def around_part(self, chunk: ChoiceChunk) -> Entry:
        """And beside a choice within a stream, once its `part` was asked for."""
        ...


class ChatShape:
    """`/v1/chat/completions`."""

    id_prefix, whole_object, chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(self, text: Text, call: ClientCall, body: ChatBody):
        self._text, self._call, self._body = text, call, body
        self._before = _last_said(body) if body.echo else ""
        self._begun: set[int] = set()
        self._told_prompt = not body.return_token_ids

    def whole(self, parts: Sequence[ChoiceChunk]) -> Entry:
        content = self._before + "".join(part.text for part in parts)
        choice: Entry = {
            "index": parts[0].index,
            "message": {"role": "assistant", "content": content, "refusal": None},
            "logprobs": self._spell([item for part in parts for item in part.logprobs]),
            "finish_reason": spell_reason(parts[-1].reason),
        }
        if self._body.return_token_ids:
            choice["token_ids"] = [token for part in parts for token in part.token_ids]
        return choice

    def part(self, chunk: ChoiceChunk) -> Entry:
        delta = {"content": chunk.text}
        if chunk.index not in self._begun:
            self._begun.add(chunk.index)
            delta = {"role": "assistant", "content": self._before + chunk.text}
        choice: Entry = {
            "index": chunk.index,
            "delta": delta,
            "logprobs": self._spell(chunk.logprobs),
            "finish_reason": spell_reason(chunk.reason),
        }
        if self._body.return_token_ids:
            choice["token_ids"] = list(chunk.token_ids)
        return choice

    def around_whole(self, parts: Sequence[Sequence[ChoiceChunk]]) -> Entry:
        around: Entry = {}
        ids = self._call.lives[0].generation.prompt_ids
        if self._body.return_token_ids:
            around["prompt_token_ids"] = list(ids)
        if self._body.prompt_logprobs is not None:
            scored = parts[0][0].prompt_logprobs
            rivals = self._body.prompt_logprobs
            around["prompt_logprobs"] = prompt_logprobs(self._text, ids, scored, rivals)
        return around

    def around_part(self, chunk: ChoiceChunk) -> Entry:
        if self._told_prompt:
            return NOTHING
        self._told_prompt = True
        return {"prompt_token_ids": list(self._call.lives[0].generation.prompt_ids)}

    def _spell(self, logprobs: Sequence[Logprob]) -> Entry | None:
        return chat_logprobs(self._text, logprobs) if self._body.logprobs else None


class CompletionShape:
    """`/v1/completions`."""

    id_prefix, whole_object, chunk_object = "cmpl-", "text_completion", "text_completion"

    def __init__(self, text: Text, call: ClientCall, body: CompletionBody):
        self._text, self._call, self._body = text, call, body
        self._texts = body.texts() if body.echo else ()
        self._columns: dict[int, Columns] = {}
        self._begun: set[int] = set()

    def whole(self, parts: Sequence[ChoiceChunk]) -> Entry:
        index = parts[0].index
        logprobs = [item for part in parts for item in part.logprobs]
        ids = [token for part in parts for token in part.token_ids]
        text = "".join(part.text for part in parts)
        scored = next((p.prompt_logprobs for p in parts if p.prompt_logprobs), ())
        whole = ChoiceChunk(index, text, ids, logprobs, parts[-1].reason, None, scored)
        choice = self.part(whole)
        if self._body.prompt_logprobs is not None:
            prompt, rivals = self._prompt_ids(index), self._body.prompt_logprobs
            choice["prompt_logprobs"] = prompt_logprobs(self._text, prompt, scored, rivals)
        return choice

    def part(self, chunk: ChoiceChunk) -> Entry:
        index, text = chunk.index, chunk.text
        # What is only foreseen comes before the answer, and so before what is echoed.
        begins = index not in self._begun and bool(chunk.token_ids or text or chunk.reason)
        echo = ""
        if begins:
            self._begun.add(index)
            echo = self._literal(index) if self._body.echo else ""
        choice: Entry = {
            "index": index,
            "text": echo + text,
            "logprobs": self._spell(chunk, begins and self._body.echo, echo),
            "finish_reason": spell_reason(chunk.reason),
        }
        if self._body.return_token_ids:
            choice["token_ids"] = list(chunk.token_ids)
            if begins:
                choice["prompt_token_ids"] = list(self._prompt_ids(index))
        return choice

    def around_whole(self, parts: Sequence[Sequence[ChoiceChunk]]) -> Entry:
        return NOTHING

    def around_part(self, chunk: ChoiceChunk) -> Entry:
        return NOTHING

    def _spell(self, chunk: ChoiceChunk, echoes: bool, literal: str) -> Entry | None:
        if self._body.logprobs is None:
            return None
        columns = self._columns.get(chunk.index)
        if columns is None:
            sampling = self._call.lives[chunk.index].generation.sampling
            columns = Columns(self._text, sampling, self._body.logprobs)
            self._columns[chunk.index] = columns
        if not echoes:
            return columns.add(chunk.logprobs)
        before = columns.echo(self._prompt_ids(chunk.index), chunk.prompt_logprobs, literal)
        return joined(before, columns.add(chunk.logprobs))

    def _prompt_ids(self, index: int) -> Sequence[int]:
        return self._call.lives[index].generation.prompt_ids

    def _literal(self, index: int) -> str:
        """A prompt as its client has sent it, or as its tokens read."""
        text = self._texts[index // self._body.n]
        return self._text.decode(self._prompt_ids(index), False) if text is None else text


def spell_reason(reason: FinishReason | None) -> str | None:
    return None if reason is None else reason.value


def _last_said(body: ChatBody) -> str:
    """The last message, where it is the assistant's as the answer is."""
    [request] = body.requests()
    last = request.chat.messages[-1]
    return last.content if last.role == "assistant" else ""
