"""What the text of an answer says, in pieces: content, reasoning and tool calls.

A reader of one choice turns its text into parts as it arrives. Each endpoint encodes the parts in
its own format.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """A piece of the answer's content."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the reasoning before the content, without its marks."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """The beginning of a tool call. Its arguments follow."""

    index: int  # of the calls of one choice, from 0
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """A piece of the arguments of a call, which joined are one JSON object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallMalformed:
    """A call that has begun turns out to be none: all its text, also of earlier parts, is content.

    A stream cannot take its events back and sends the text as content. A whole answer has no such
    call."""

    index: int
    text: str


AnswerPart = Content | Reasoning | ToolCallStart | ToolCallArguments | ToolCallMalformed


class AnswerReader(Protocol):
    """Reads the text of one choice. The parts do not depend on how the text is divided, except
    for where pieces of one kind are divided."""

    def feed(self, text: str) -> Sequence[AnswerPart]:
        """The parts that further text completes or continues."""

    def finish(self, cut: bool = False) -> Sequence[AnswerPart]:
        """The parts of text that was held back, once the choice has ended. `cut`: by a limit, so
        that a call may be incomplete; otherwise an incomplete call is malformed."""
