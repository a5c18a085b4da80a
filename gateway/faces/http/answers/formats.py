"""The answer formats of the two endpoints, complete and streamed."""

from collections.abc import Sequence

from gateway.faces.http.answers.logprobs import (
    Columns,
    Entry,
    LogprobColumns,
    encode_chat_logprobs,
    encode_prompt_logprobs,
    join_columns,
)
from gateway.faces.http.answers.parts import encode_reason, read_call
from gateway.faces.http.schema import ChatBody, CompletionBody
from gateway.requests.text import Text
from gateway.sessions.call import ClientCall
from gateway.sessions.session import ChoiceChunk, Logprob

NO_EXTRAS: Entry = {}


class AnswerFormat:
    """How an endpoint encodes ids, objects and choices."""

    id_prefix: str
    whole_object: str
    chunk_object: str
    repeats: bool  # events of a choice after its first differ in text, reason and forecast only

    def __init__(self, text: Text, call: ClientCall):
        self._text, self._call = text, call
        self._started: set[int] = set()  # choices with an encoded first event

    def whole_choice(self, chunks: Sequence[ChoiceChunk]) -> Entry:
        """A finished choice, from all its chunks."""
        raise NotImplementedError

    def chunk_choice(self, chunk: ChoiceChunk) -> Entry:
        """The choice of one event of a stream."""
        raise NotImplementedError

    def usage_details(self) -> Entry:
        """Further counts of `usage`, once the answer is complete."""
        return NO_EXTRAS

    def whole_extras(self, choices: Sequence[Sequence[ChoiceChunk]]) -> Entry:
        """Further fields of a complete answer, next to `choices`."""
        return NO_EXTRAS

    def chunk_extras(self, chunk: ChoiceChunk) -> Entry:
        """Further fields of an event, next to `choices`. Call `chunk_choice` first."""
        return NO_EXTRAS

    def has_started(self, index: int) -> bool:
        """Whether the first event of a choice was encoded."""
        return index in self._started

    def _prompt_ids(self, index: int) -> Sequence[int]:
        return self._call.choices[index].request.prompt_ids


class ChatFormat(AnswerFormat):
    """`/v1/chat/completions`."""

    id_prefix, whole_object, chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(self, text: Text, call: ClientCall, body: ChatBody):
        super().__init__(text, call)
        self._body = body
        self.repeats = not (body.logprobs or body.return_token_ids)
        self._echo = body.last_assistant_content() if body.echo else ""
        self._prompt_ids_sent = not body.return_token_ids
        self.parts = read_call(text, call, body.include_reasoning)

    def whole_choice(self, chunks: Sequence[ChoiceChunk]) -> Entry:
        text, reason = "".join(chunk.text for chunk in chunks), encode_reason(chunks[-1].reason)
        message: Entry = {"role": "assistant", "content": self._echo + text, "refusal": None}
        if self.parts is not None:
            read, reason = self.parts.encode_whole(chunks)
            message |= read
            if self._echo:
                message["content"] = self._echo + str(message["content"] or "")
        choice: Entry = {
            "index": chunks[0].index,
            "message": message,
            "logprobs": self._encode_logprobs([item for c in chunks for item in c.logprobs]),
            "finish_reason": reason,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = [token for chunk in chunks for token in chunk.token_ids]
        return choice

    def chunk_choice(self, chunk: ChoiceChunk) -> Entry:
        delta: Entry = {"content": chunk.text}
        if chunk.index not in self._started:
            self._started.add(chunk.index)
            delta = {"role": "assistant", "content": self._echo + chunk.text}
        return self.delta_choice(chunk, delta, encode_reason(chunk.reason))

    def open_choice(self, index: int) -> Sequence[Entry]:
        """The first delta of a choice that has not begun, with its role."""
        if index in self._started:
            return ()
        self._started.add(index)
        return [{"role": "assistant", "content": self._echo}]

    def delta_choice(self, chunk: ChoiceChunk, delta: Entry, reason: str | None) -> Entry:
        """The choice of one event, with what its text says."""
        choice: Entry = {
            "index": chunk.index,
            "delta": delta,
            "logprobs": self._encode_logprobs(chunk.logprobs),
            "finish_reason": reason,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = list(chunk.token_ids)
        return choice

    def usage_details(self) -> Entry:
        return NO_EXTRAS if self.parts is None else self.parts.usage_details()

    def whole_extras(self, choices: Sequence[Sequence[ChoiceChunk]]) -> Entry:
        extras: Entry = {}
        ids = self._prompt_ids(0)
        if self._body.return_token_ids:
            extras["prompt_token_ids"] = list(ids)
        if self._body.prompt_logprobs is not None:
            scores, top_n = choices[0][0].prompt_logprobs, self._body.prompt_logprobs
            extras["prompt_logprobs"] = encode_prompt_logprobs(self._text, ids, scores, top_n)
        return extras

    def chunk_extras(self, chunk: ChoiceChunk) -> Entry:
        if self._prompt_ids_sent:
            return NO_EXTRAS
        self._prompt_ids_sent = True
        return {"prompt_token_ids": list(self._prompt_ids(0))}

    def _encode_logprobs(self, logprobs: Sequence[Logprob]) -> Entry | None:
        return encode_chat_logprobs(self._text, logprobs) if self._body.logprobs else None


class CompletionFormat(AnswerFormat):
    """`/v1/completions`."""

    id_prefix, whole_object, chunk_object = "cmpl-", "text_completion", "text_completion"

    def __init__(self, text: Text, call: ClientCall, body: CompletionBody):
        super().__init__(text, call)
        self._body = body
        self.repeats = body.logprobs is None and not body.return_token_ids
        self._prompt_texts = body.prompt_texts() if body.echo else ()
        self._columns: dict[int, LogprobColumns] = {}

    def whole_choice(self, chunks: Sequence[ChoiceChunk]) -> Entry:
        index = chunks[0].index
        logprobs = [item for chunk in chunks for item in chunk.logprobs]
        ids = [token for chunk in chunks for token in chunk.token_ids]
        text = "".join(chunk.text for chunk in chunks)
        scores = next((c.prompt_logprobs for c in chunks if c.prompt_logprobs), ())
        merged = ChoiceChunk(index, text, ids, logprobs, chunks[-1].reason, None, scores)
        choice = self.chunk_choice(merged)
        if self._body.prompt_logprobs is not None:
            prompt, top_n = self._prompt_ids(index), self._body.prompt_logprobs
            choice["prompt_logprobs"] = encode_prompt_logprobs(self._text, prompt, scores, top_n)
        return choice

    def chunk_choice(self, chunk: ChoiceChunk) -> Entry:
        index, text = chunk.index, chunk.text
        # A chunk with only a forecast precedes the answer, and so the echoed prompt.
        has_content = bool(chunk.token_ids or text or chunk.reason)
        starts = index not in self._started and has_content
        echo = ""
        if starts:
            self._started.add(index)
            echo = self._prompt_text(index) if self._body.echo else ""
        choice: Entry = {
            "index": index,
            "text": echo + text,
            "logprobs": self._encode_logprobs(chunk, starts and self._body.echo, echo),
            "finish_reason": encode_reason(chunk.reason),
        }
        if self._body.return_token_ids:
            choice["token_ids"] = list(chunk.token_ids)
            if starts:
                choice["prompt_token_ids"] = list(self._prompt_ids(index))
        return choice

    def _encode_logprobs(self, chunk: ChoiceChunk, echo: bool, prompt_text: str) -> Columns | None:
        if self._body.logprobs is None:
            return None
        columns = self._columns.get(chunk.index)
        if columns is None:
            sampling = self._call.choices[chunk.index].request.sampling
            columns = LogprobColumns(self._text, sampling, self._body.logprobs)
            self._columns[chunk.index] = columns
        if not echo:
            return columns.encode_answer(chunk.logprobs)
        ids = self._prompt_ids(chunk.index)
        prompt = columns.encode_prompt(ids, chunk.prompt_logprobs, prompt_text)
        return join_columns(prompt, columns.encode_answer(chunk.logprobs))

    def _prompt_text(self, index: int) -> str:
        """The prompt as the client sent it; a prompt of token ids is decoded."""
        text = self._prompt_texts[index // self._body.n]
        return self._text.decode(self._prompt_ids(index), False) if text is None else text
