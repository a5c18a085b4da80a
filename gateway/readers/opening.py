"""Opens the reader of an answer. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from gateway.readers.call_formats import (
    CALL_FORMATS,
    HERMES,
    CallFormat,
    JsonCallFormat,
    find_call_format,
    open_call_reader,
)
from gateway.readers.reasoning import (
    REASONING_FORMATS,
    ReasoningFormat,
    ReasoningReader,
    find_reasoning_format,
)
from gateway.types.answer_parts import AnswerReader
from gateway.types.tools import ToolUse
from services.runtime.config import ConfigError

F = TypeVar("F")
AUTO, NONE = "auto", "none"


@dataclass(frozen=True, slots=True)
class AnswerFormats:
    """How a model writes tool calls and reasoning."""

    calls: CallFormat | None = None  # None: unknown
    reasoning: ReasoningFormat | None = None

    @property
    def forced_calls(self) -> JsonCallFormat:
        """How the model is made to write calls."""
        return self.calls if isinstance(self.calls, JsonCallFormat) else HERMES

    def calls_of(self, use: ToolUse) -> CallFormat:
        """How an answer to a request with these tools writes calls."""
        return self.forced_calls if use.required or self.calls is None else self.calls


def select_formats(chat_template: str, calls: str = AUTO, reasoning: str = AUTO) -> AnswerFormats:
    """The formats by name. `auto`: those that the template speaks of; `none`: none. Raises
    ValueError with the known names."""
    return AnswerFormats(
        _select(CALL_FORMATS, find_call_format(chat_template) if calls == AUTO else calls),
        _select(
            REASONING_FORMATS,
            find_reasoning_format(chat_template) if reasoning == AUTO else reasoning,
        ),
    )


def check_names(calls: str, reasoning: str) -> None:
    """Raises ConfigError for a name that is not known; an empty one is not given."""
    for option, known, name in (
        ("tool_call_parser", CALL_FORMATS, calls),
        ("reasoning_parser", REASONING_FORMATS, reasoning),
    ):
        try:
            _select(known, "" if name == AUTO else name)
        except ValueError as error:
            raise ConfigError(f"gateway.{option}: {error}") from None


def open_reader(
    formats: AnswerFormats, use: ToolUse | None, prompt_end: str
) -> AnswerReader | None:
    """A reader of one choice; None if its text is content as it is.

    `use`: the tools that the answer may call, or None. `prompt_end`: the last characters of the
    prompt as text, which may open the reasoning.
    """
    calls: AnswerReader | None = None
    if use is not None and use.tools:
        calls = open_call_reader(formats.calls_of(use), use)
    if formats.reasoning is None:
        return calls
    opened = formats.reasoning.is_opened_by(prompt_end)
    if opened is False:
        return calls
    return ReasoningReader(formats.reasoning, opened, calls)


def _select(known: Mapping[str, F], name: str) -> F | None:
    if name in ("", NONE):
        return None
    if name not in known:
        raise ValueError(f"unknown name {name!r}; known: {', '.join((AUTO, NONE, *known))}")
    return known[name]
