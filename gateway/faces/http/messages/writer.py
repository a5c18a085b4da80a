"""The answers of `/v1/messages`, complete and streamed."""

import json
from collections.abc import Mapping, Sequence

from gateway.faces.http.answers.items import (
    AnswerItems,
    Ended,
    Grown,
    Item,
    ItemKind,
    Started,
    Step,
)
from gateway.faces.http.answers.parts import note_content
from gateway.faces.http.answers.sse import encode_error_event, encode_typed_event
from gateway.faces.http.errors import MESSAGES_PATH
from gateway.sessions.call import ClientCall
from gateway.sessions.session import ChoiceChunk
from services.core import FinishReason
from services.runtime.errors import ServiceError

Entry = dict[str, object]

PING: Entry = {"type": "ping"}
# A block's type, the field of its text, and the type of its deltas.
DELTAS: Mapping[ItemKind, tuple[str, str]] = {
    ItemKind.CONTENT: ("text_delta", "text"),
    ItemKind.REASONING: ("thinking_delta", "thinking"),
    ItemKind.CALL: ("input_json_delta", "partial_json"),
}


class MessageWriter:
    """Writes one message: an AnswerWriter."""

    ping = encode_typed_event(PING)
    slow = False

    def __init__(self, call: ClientCall, model: str, items: AnswerItems):
        self._call, self._model, self._items = call, model, items
        self._started = False

    def encode_whole(self, choices: Sequence[Sequence[ChoiceChunk]]) -> Entry:
        (chunks,) = choices
        self._items.read(chunks)
        blocks = [_whole_block(item) for item in self._items.items if not item.malformed]
        return self._message(blocks, *self._find_stop(chunks[-1].reason))

    def encode_chunk(self, chunk: ChoiceChunk) -> bytes:
        events: list[Entry] = []
        if not self._started:
            self._started = True
            events += [{"type": "message_start", "message": self._message([], None, None)}, PING]
        steps = self._items.read((chunk,))
        if any(isinstance(step, Grown) and step.is_content for step in steps):
            note_content(self._call.choices[0])
        events += map(_encode_step, steps)
        if chunk.reason is not None:
            events += self._encode_end(chunk.reason)
        return b"".join(map(encode_typed_event, events))

    def encode_tail(self) -> bytes:
        return b""

    def encode_last(self, error: ServiceError | None) -> bytes:
        return b"" if error is None else encode_error_event(error, MESSAGES_PATH)

    def _encode_end(self, reason: FinishReason) -> list[Entry]:
        stop_reason, stop_sequence = self._find_stop(reason)
        delta = {"stop_reason": stop_reason, "stop_sequence": stop_sequence}
        return [
            {"type": "message_delta", "delta": delta, "usage": self._usage()},
            {"type": "message_stop"},
        ]

    def _message(
        self, blocks: Sequence[Entry], stop_reason: str | None, stop_sequence: str | None
    ) -> Entry:
        return {
            "id": f"msg_{self._call.answer_id}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": blocks,
            "stop_reason": stop_reason,
            "stop_sequence": stop_sequence,
            "usage": self._usage(),
        }

    def _usage(self) -> Entry:
        cached = self._call.cached_tokens
        return {
            "input_tokens": self._call.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self._call.completion_tokens,
        }

    def _find_stop(self, reason: FinishReason | None) -> tuple[str, str | None]:
        """The stop reason and the stop sequence. A deadline cuts an answer as a limit does."""
        stop_sequence = self._call.choices[0].session.stop_string
        if reason is not FinishReason.STOP:
            return "max_tokens", None
        if self._items.has_calls:
            return "tool_use", None
        return ("end_turn" if stop_sequence is None else "stop_sequence"), stop_sequence


def _encode_step(step: Step) -> Entry:
    match step:
        case Started(item):
            block = _empty_block(item)
            return {"type": "content_block_start", "index": item.index, "content_block": block}
        case Grown(item, text):
            kind, field = DELTAS[item.kind]
            delta = {"type": kind, field: text}
            return {"type": "content_block_delta", "index": item.index, "delta": delta}
        case Ended(item):
            return {"type": "content_block_stop", "index": item.index}


def _empty_block(item: Item) -> Entry:
    match item.kind:
        case ItemKind.CONTENT:
            return {"type": "text", "text": ""}
        case ItemKind.REASONING:
            return {"type": "thinking", "thinking": "", "signature": ""}
        case ItemKind.CALL:
            return {"type": "tool_use", "id": item.call_id, "name": item.name, "input": {}}


def _whole_block(item: Item) -> Entry:
    block = _empty_block(item)
    match item.kind:
        case ItemKind.CONTENT:
            block["text"] = item.text
        case ItemKind.REASONING:
            block["thinking"] = item.text
        case ItemKind.CALL:
            block["input"] = _decode_arguments(item.text)
    return block


def _decode_arguments(text: str) -> object:
    """The arguments of a call; none if a limit has cut them."""
    try:
        given = json.loads(text)
    except ValueError:
        return {}
    return given if isinstance(given, dict) else {}
