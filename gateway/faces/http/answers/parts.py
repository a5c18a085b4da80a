"""Tool calls and reasoning of chat answers in OpenAI's format, complete and as deltas."""

import time
from collections.abc import Iterator, Sequence

from gateway.faces.http.answers.logprobs import Entry
from gateway.readers.harmony import HarmonyReader
from gateway.readers.joined import join_parts
from gateway.readers.reasoning import ReasoningReader
from gateway.requests.text import Text
from gateway.sessions.call import ClientCall, LiveChoice
from gateway.sessions.session import ChoiceChunk
from gateway.types.answer_parts import (
    AnswerPart,
    AnswerReader,
    Content,
    Reasoning,
    ToolCallArguments,
    ToolCallMalformed,
    ToolCallStart,
)
from services.core import FinishReason

STOP = FinishReason.STOP
TOOL_CALLS = "tool_calls"  # the finish reason of an answer that calls tools


class ChoiceParts:
    """What the text of one choice says, as it arrives."""

    def __init__(self, reader: AnswerReader):
        self._reader = reader
        self._calls = 0  # that are not malformed
        self.passes = False  # further text is content as it is

    @property
    def reasoning_chars(self) -> int:
        """Characters of the answer up to the end of its reasoning."""
        reader = self._reader
        return reader.reasoning_chars if isinstance(reader, ReasoningReader | HarmonyReader) else 0

    def read(self, chunk: ChoiceChunk) -> Sequence[AnswerPart]:
        """The parts of a chunk, and at the end of the choice of all that was held back."""
        parts = [*self._reader.feed(chunk.text)]
        if chunk.reason is not None:
            parts += self._reader.finish(cut=chunk.reason is not STOP)
        for part in parts:
            self._calls += isinstance(part, ToolCallStart)
            self._calls -= isinstance(part, ToolCallMalformed)
        reader = self._reader
        self.passes = isinstance(reader, ReasoningReader | HarmonyReader) and reader.passes_content
        return parts

    def encode_reason(self, reason: FinishReason | None) -> str | None:
        return TOOL_CALLS if reason is STOP and self._calls else encode_reason(reason)


class AnswerParts:
    """The choices of one client call that have a reader: their text is more than content."""

    def __init__(self, text: Text, call: ClientCall, include_reasoning: bool):
        self._text, self._call = text, call
        self._include_reasoning = include_reasoning
        self._choices = {
            live.session.index: ChoiceParts(live.request.open_reader())
            for live in call.choices
            if live.request.open_reader is not None
        }

    def of(self, index: int) -> ChoiceParts | None:
        """The parts of a choice; None if all its text is content."""
        return self._choices.get(index)

    def encode_whole(self, chunks: Sequence[ChoiceChunk]) -> tuple[Entry, str | None]:
        """The fields of a finished choice's message, and its finish reason."""
        choice = self._choices[chunks[0].index]
        answer = join_parts(part for chunk in chunks for part in choice.read(chunk))
        message: Entry = {"content": answer.content}
        if answer.calls:
            message["content"] = answer.content or None
            message["tool_calls"] = [
                _encode_call(call.call_id, call.name, call.arguments) for call in answer.calls
            ]
        if answer.reasoning and self._include_reasoning:
            message |= _encode_reasoning(answer.reasoning)
        return message, choice.encode_reason(chunks[-1].reason)

    def encode_deltas(self, parts: Sequence[AnswerPart]) -> Iterator[Entry]:
        """A delta for each part that is sent."""
        for part in parts:
            match part:
                case Content(text) | ToolCallMalformed(_, text):
                    yield {"content": text}
                case Reasoning(text):
                    if self._include_reasoning:
                        yield _encode_reasoning(text)
                case ToolCallStart(index, call_id, name):
                    yield {TOOL_CALLS: [{"index": index, **_encode_call(call_id, name, "")}]}
                case ToolCallArguments(index, text):
                    yield {TOOL_CALLS: [{"index": index, "function": {"arguments": text}}]}

    def usage_details(self) -> Entry:
        """The tokens of all reasoning. O(tokens of the reasoning)."""
        tokens = sum(
            count_tokens(self._text, self._call.choices[index], choice.reasoning_chars)
            for index, choice in self._choices.items()
        )
        return {"completion_tokens_details": {"reasoning_tokens": tokens}}


def note_content(live: LiveChoice) -> None:
    """The client receives content of a choice now."""
    live.session.content_s = min(live.session.content_s, time.monotonic())


def count_tokens(text: Text, live: LiveChoice, chars: int) -> int:
    """The number of the answer's first tokens that have so many characters. O(them)."""
    if not chars:
        return 0
    detokenizer = text.detokenizer(live.request.sampling)
    for number, token in enumerate(live.session.output, 1):
        chars -= len(detokenizer.feed((token,)))
        if chars <= 0:
            return number
    return len(live.session.output)


def read_call(text: Text, call: ClientCall, include_reasoning: bool) -> AnswerParts | None:
    """The parts of a call's choices; None if all their text is content."""
    if all(live.request.open_reader is None for live in call.choices):
        return None
    return AnswerParts(text, call, include_reasoning)


def encode_reason(reason: FinishReason | None) -> str | None:
    return None if reason is None else reason.value


def _encode_call(call_id: str, name: str, arguments: str) -> Entry:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def _encode_reasoning(text: str) -> Entry:
    """Under both names that clients read."""
    return {"reasoning_content": text, "reasoning": text}
