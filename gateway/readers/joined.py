"""A whole answer from its parts. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from gateway.types.answer_parts import (
    AnswerPart,
    Content,
    Reasoning,
    ToolCallArguments,
    ToolCallMalformed,
    ToolCallStart,
)


@dataclass(slots=True)
class ToolCall:
    """A call of a whole answer."""

    call_id: str
    name: str
    arguments: str = ""  # a JSON object; of an answer that a limit cut, its beginning


@dataclass(slots=True)
class JoinedAnswer:
    """What the text of one choice says."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)


def join_parts(parts: Iterable[AnswerPart]) -> JoinedAnswer:
    """The whole answer, without calls that are malformed: their text is content."""
    content: list[str] = []
    reasoning: list[str] = []
    calls: dict[int, ToolCall] = {}
    for part in parts:
        match part:
            case Content(text):
                content.append(text)
            case Reasoning(text):
                reasoning.append(text)
            case ToolCallStart(index, call_id, name):
                calls[index] = ToolCall(call_id, name)
            case ToolCallArguments(index, text):
                calls[index].arguments += text
            case ToolCallMalformed(index, text):
                del calls[index]
                content.append(text)
    return JoinedAnswer("".join(content), "".join(reasoning), list(calls.values()))
