"""Follows an answer as its bytes pass: tokens so far, its end and its usage. Pure."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from services.core import FinishReason
from services.runtime.network.wire import EventReader, WireError

EVENT_STREAM = "text/event-stream"
DONE = b"[DONE]"
MAX_TOKENS = 2**24  # of one request; a usage beyond is no count
REASONS = {
    "stop": FinishReason.STOP,
    "tool_calls": FinishReason.STOP,
    "length": FinishReason.LENGTH,
}


@dataclass(slots=True)
class Answer:
    """What is known of an answer. `tokens` are those of all choices: from its usage if it states
    one, else its events with text. `reason`: of the last choice that ended."""

    tokens: int = 0
    prompt_tokens: int = 0
    reason: FinishReason | None = None


class AnswerFollower(Protocol):
    """Follows one answer. Bytes that are not understood are passed over."""

    answer: Answer

    def feed(self, data: bytes) -> None: ...

    def end(self) -> None: ...


class StreamFollower:
    """An answer as server-sent events of at most `max_bytes` each."""

    def __init__(self, max_bytes: int) -> None:
        self.answer = Answer()
        self._max_bytes = max_bytes
        self._events = EventReader(max_bytes)
        self._counted = False  # by usage

    def feed(self, data: bytes) -> None:
        try:
            events = self._events.feed(data)
        except WireError:  # an event without an end: nothing more is read
            self._events = EventReader(self._max_bytes)
            return
        for event in events:
            if event != DONE:
                self._read(_parse(event))

    def end(self) -> None:
        """Nothing is held back."""

    def _read(self, chunk: dict[str, Any]) -> None:
        for choice in _choices(chunk):
            self.answer.reason = _reason(choice) or self.answer.reason
            if not self._counted and _has_text(choice):
                self.answer.tokens += 1
        self._counted = _read_usage(chunk, self.answer) or self._counted


class BodyFollower:
    """An answer in one body, of which at most `max_bytes` are kept to be read."""

    def __init__(self, max_bytes: int) -> None:
        self.answer = Answer()
        self._max_bytes = max_bytes
        self._parts: list[bytes] = []
        self._size = 0

    def feed(self, data: bytes) -> None:
        self._size += len(data)
        if self._size <= self._max_bytes:
            self._parts.append(data)
        else:
            self._parts.clear()

    def end(self) -> None:
        content = _parse(b"".join(self._parts))
        _read_usage(content, self.answer)
        for choice in _choices(content):
            self.answer.reason = _reason(choice) or self.answer.reason


def follower(content_type: str, max_bytes: int) -> AnswerFollower:
    """The follower for a content type."""
    streams = content_type.partition(";")[0].strip().lower() == EVENT_STREAM
    return StreamFollower(max_bytes) if streams else BodyFollower(max_bytes)


def _parse(text: bytes) -> dict[str, Any]:
    try:
        content = json.loads(text) if text else {}
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _choices(content: dict[str, Any]) -> Iterable[dict[str, Any]]:
    choices = content.get("choices")
    return [each for each in choices if isinstance(each, dict)] if isinstance(choices, list) else []


def _has_text(choice: dict[str, Any]) -> bool:
    """Whether a chunk of a choice has at least one token. The first chunk of a chat has a role."""
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        return bool(choice.get("text"))
    return any(value for key, value in delta.items() if key != "role")


def _reason(choice: dict[str, Any]) -> FinishReason | None:
    named = choice.get("finish_reason")
    return REASONS.get(named) if isinstance(named, str) else None


def _read_usage(content: dict[str, Any], answer: Answer) -> bool:
    usage = content.get("usage")
    if not isinstance(usage, dict):
        return False
    tokens, prompt = _count(usage.get("completion_tokens")), _count(usage.get("prompt_tokens"))
    if tokens is None:
        return False
    answer.tokens = max(answer.tokens, tokens)
    answer.prompt_tokens = prompt or 0
    return True


def _count(value: object) -> int | None:
    """A number of tokens; `True` is none."""
    return value if type(value) is int and 0 <= value < MAX_TOKENS else None
