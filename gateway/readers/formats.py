"""How a model writes tool calls and reasoning: selected by name, or by its templates. Pure."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from gateway.readers.calls.formats import CALL_FORMATS, CALL_MARKS, HARMONY, HERMES
from gateway.readers.calls.kinds import CallFormat
from gateway.readers.harmony import HarmonyReader
from gateway.readers.reasoning import REASONING_FORMATS, REASONING_MARKS, ReasoningFormat
from gateway.types.answer_parts import AnswerReader
from gateway.types.tools import Tools, ToolUse
from services.runtime.config import ConfigError

F = TypeVar("F")
AUTO, NONE = "auto", "none"
GPT_OSS = "openai_gptoss"  # the reasoning of answers in the harmony format
REASONING_NAMES: Mapping[str, ReasoningFormat | None] = {**REASONING_FORMATS, GPT_OSS: None}


@dataclass(frozen=True, slots=True)
class AnswerFormats:
    """How a model writes tool calls and reasoning."""

    calls: CallFormat | None = None  # None: unknown
    reasoning: ReasoningFormat | None = None
    # Reads all of an answer, in place of the readers of both. Arguments: the end of the prompt, the
    # tools, and whether the answer may have more than one call.
    whole: Callable[[str, Tools, bool], AnswerReader] | None = None

    def calls_of(self, use: ToolUse) -> CallFormat | None:
        """How an answer to a request with these tools writes calls. Calls are forced in the
        model's format, or as in HERMES if that cannot express one of the tools."""
        if not use.required or (self.calls and not any(map(self.calls.find_fault, use.tools))):
            return self.calls
        return HERMES


def select_formats(
    chat_template: str,
    calls: str = AUTO,
    reasoning: str = AUTO,
    response_template: Mapping[str, object] | None = None,
) -> AnswerFormats:
    """The formats by name. `auto`: those that the chat template shows, or that of the response
    template if it shows no known one; `none`: none. Raises ValueError with the names, and
    ConfigError for a response template that cannot be used."""
    found = AnswerFormats(
        _select(CALL_FORMATS, _find_name(calls, CALL_MARKS, chat_template)),
        _select(REASONING_NAMES, _find_name(reasoning, REASONING_MARKS, chat_template)),
    )
    if found.calls is HARMONY or reasoning == GPT_OSS:
        return AnswerFormats(found.calls, whole=_open_harmony)
    if response_template and calls == reasoning == AUTO and found == AnswerFormats():
        from gateway.readers.response_template import (  # imports transformers
            TemplateReader,
            check_template,
        )

        check_template(response_template)
        return AnswerFormats(whole=partial(TemplateReader, response_template))
    return found


def _open_harmony(prompt_end: str, tools: Tools, parallel: bool) -> AnswerReader:
    return HarmonyReader(tools, parallel)


def check_names(calls: str, reasoning: str) -> None:
    """Raises ConfigError for a name that is not known; an empty one is not given."""
    for option, known, name in (
        ("tool_call_parser", CALL_FORMATS, calls),
        ("reasoning_parser", REASONING_NAMES, reasoning),
    ):
        try:
            _select(known, "" if name == AUTO else name)
        except ValueError as error:
            raise ConfigError(f"gateway.{option}: {error}") from None


def _find_name(name: str, marks: Iterable[tuple[str, str]], chat_template: str) -> str:
    """The name; for `auto`, that of the first format that a chat template shows, empty if there is
    none."""
    if name != AUTO:
        return name
    return next((shown for mark, shown in marks if mark in chat_template), "")


def _select(known: Mapping[str, F], name: str) -> F | None:
    if name in ("", NONE):
        return None
    if name not in known:
        raise ValueError(f"unknown name {name!r}; known: {', '.join((AUTO, NONE, *known))}")
    return known[name]
