"""Opens the reader of an answer."""

from gateway.readers.call_formats import open_call_reader
from gateway.readers.formats import AnswerFormats
from gateway.readers.reasoning import ReasoningReader
from gateway.readers.response_template import TemplateReader
from gateway.types.answer_parts import AnswerReader
from gateway.types.tools import ToolUse


def open_reader(
    formats: AnswerFormats, use: ToolUse | None, prompt_end: str
) -> AnswerReader | None:
    """A reader of one choice; None if its text is content as it is.

    `use`: the tools that the answer may call, or None. `prompt_end`: the last characters of the
    prompt as text, which may open the reasoning.
    """
    if formats.template is not None and not (use is not None and use.required):
        tools = {} if use is None else {tool.name: tool for tool in use.tools}
        return TemplateReader(formats.template, prompt_end, tools, use is None or use.parallel)
    calls: AnswerReader | None = None
    if use is not None and use.tools and (call_format := formats.calls_of(use)):
        calls = open_call_reader(call_format, use)
    if formats.reasoning is None:
        return calls
    opened = formats.reasoning.is_opened_by(prompt_end)
    if opened is False:
        return calls
    return ReasoningReader(formats.reasoning, opened, calls)
