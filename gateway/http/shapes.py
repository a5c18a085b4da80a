"""The two endpoints' answers, whole and as chunks. One class an endpoint, one method a shape."""

import json
from collections.abc import Sequence
from typing import Protocol

from gateway.http.logprobs import Entry, chat_logprobs, completion_logprobs
from gateway.requests.text import Text
from gateway.sessions.call import ClientCall
from gateway.sessions.session import ChoiceChunk, Logprob
from services.core import FinishReason


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


class ChatShape:
    """`/v1/chat/completions`."""

    id_prefix, whole_object, chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(self, text: Text, logprobs: bool):
        self._text, self._logprobs = text, logprobs
        self._begun: set[int] = set()

    def whole(self, parts: Sequence[ChoiceChunk]) -> Entry:
        content = "".join(part.text for part in parts)
        return {
            "index": parts[0].index,
            "message": {"role": "assistant", "content": content, "refusal": None},
            "logprobs": self._spell([item for part in parts for item in part.logprobs]),
            "finish_reason": spell_reason(parts[-1].reason),
        }

    def part(self, chunk: ChoiceChunk) -> Entry:
        delta = {"content": chunk.text}
        if chunk.index not in self._begun:
            self._begun.add(chunk.index)
            delta = {"role": "assistant", "content": chunk.text}
        return {
            "index": chunk.index,
            "delta": delta,
            "logprobs": self._spell(chunk.logprobs),
            "finish_reason": spell_reason(chunk.reason),
        }

    def _spell(self, logprobs: Sequence[Logprob]) -> Entry | None:
        return chat_logprobs(self._text, logprobs) if self._logprobs else None


class CompletionShape:
    """`/v1/completions`."""

    id_prefix, whole_object, chunk_object = "cmpl-", "text_completion", "text_completion"

    def __init__(self, text: Text, logprobs: bool):
        self._text, self._logprobs = text, logprobs
        self._offsets: dict[int, int] = {}

    def whole(self, parts: Sequence[ChoiceChunk]) -> Entry:
        index = parts[0].index
        logprobs = [item for part in parts for item in part.logprobs]
        text = "".join(part.text for part in parts)
        return self._choice(index, text, logprobs, parts[-1].reason)

    def part(self, chunk: ChoiceChunk) -> Entry:
        return self._choice(chunk.index, chunk.text, chunk.logprobs, chunk.reason)

    def _choice(
        self, index: int, text: str, logprobs: Sequence[Logprob], reason: FinishReason | None
    ) -> Entry:
        spelled = None
        if self._logprobs:
            offset = self._offsets.get(index, 0)
            spelled, self._offsets[index] = completion_logprobs(self._text, logprobs, offset)
        return {
            "index": index,
            "text": text,
            "logprobs": spelled,
            "finish_reason": spell_reason(reason),
        }


def spell_reason(reason: FinishReason | None) -> str | None:
    return None if reason is None else reason.value


def usage(call: ClientCall) -> dict[str, int]:
    return {
        "prompt_tokens": call.prompt_tokens,
        "completion_tokens": call.completion_tokens,
        "total_tokens": call.prompt_tokens + call.completion_tokens,
    }


class ChunkWriter:
    """Writes a stream's events; what all of them share is rendered once."""

    def __init__(self, shape: Shape, call: ClientCall, model: str, include_usage: bool):
        head = json.dumps(
            {
                "id": shape.id_prefix + call.request_id,
                "object": shape.chunk_object,
                "created": call.created_unix_s,
                "model": model,
            }
        )
        self._head = f'data: {head[:-1]}, "choices": ['
        self._tail = '], "usage": null}\n\n' if include_usage else "]}\n\n"
        self._shape = shape

    def chunk(self, chunk: ChoiceChunk) -> bytes:
        choice = json.dumps(self._shape.part(chunk), ensure_ascii=False)
        return f"{self._head}{choice}{self._tail}".encode()

    def usage(self, call: ClientCall) -> bytes:
        return f'{self._head}], "usage": {json.dumps(usage(call))}}}\n\n'.encode()
