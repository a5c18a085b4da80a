"""Selects the reader of an answer."""

from collections.abc import Callable
from functools import partial

from gateway.readers.calls.kinds import open_call_reader
from gateway.readers.formats import AnswerFormats
from gateway.readers.reasoning import ReasoningFormat, ReasoningReader
from gateway.types.answer_parts import AnswerReader
from gateway.types.tools import ToolUse

Opener = Callable[[], AnswerReader]


def select_reader(formats: AnswerFormats, use: ToolUse | None, prompt_end: str) -> Opener | None:
    """Opens a reader of one choice; None if its text is content as it is.

    `use`: the tools that the answer may call, or None. `prompt_end`: the last characters of the
    prompt as text, which may open the reasoning.
    """
    forced_otherwise = use is not None and use.required and formats.calls is None
    if formats.whole is not None and not forced_otherwise:
        tools = {} if use is None else {tool.name: tool for tool in use.tools}
        parallel = use is None or use.parallel
        return partial(formats.whole, prompt_end, tools, parallel)
    open_calls: Opener | None = None
    if use is not None and use.tools and (call_format := formats.calls_of(use)):
        open_calls = partial(open_call_reader, call_format, use)
    if formats.reasoning is None:
        return open_calls
    opened = formats.reasoning.is_opened_by(prompt_end)
    if opened is False:
        return open_calls
    return partial(_open_reasoning, formats.reasoning, opened, open_calls)


def _open_reasoning(
    form: ReasoningFormat, opened: bool | None, open_rest: Opener | None
) -> AnswerReader:
    return ReasoningReader(form, opened, open_rest() if open_rest else None)
