"""Answers in each format of calls, with what they say, worked by hand."""

from collections.abc import Sequence

from gateway.readers.formats import AnswerFormats, select_formats
from gateway.readers.joined import JoinedAnswer, join_parts
from gateway.readers.opening import select_reader
from gateway.types.answer_parts import AnswerPart, AnswerReader
from gateway.types.tools import Tool, ToolUse

USE = ToolUse((Tool("f"), Tool("g", parameters={"properties": {"b": {"type": "string"}}})))
F1, G0 = ("f", '{"a": 1}'), ("g", "{}")
SEP = "<｜tool▁sep｜>"
BEGIN, END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
FIRST, LAST = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"

# Format, text, content, calls.
ANSWERS = [
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "", [F1]),
    ("hermes", 'Hi.\n\n<tool_call>{"name":"f","arguments":{"a": 1}}</tool_call>\n', "Hi.", [F1]),
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n'
     '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>', "", [F1, G0]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"s": "}</tool_call>\\"{"}}</tool_call> ok',
     "ok", [("f", '{"s": "}</tool_call>\\"{"}')]),
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 1}}', "", [F1]),
    ("hermes", "a <tool_cal b ", "a <tool_cal b ", []),
    ("hermes", '<tool_call>\n{"name": "h", "arguments": {}}\n</tool_call>',
     '<tool_call>\n{"name": "h", "arguments": {}}\n</tool_call>', []),
    ("hermes", 'x \n<tool_call>\n{"name": "f", "arguments": {"a": }}\n</tool_call> y',
     'x \n<tool_call>\n{"name": "f", "arguments": {"a": }}\n</tool_call> y', []),
    ("hermes", 'x<tool_call>{"name": "f", "arguments": {"a": [1}}</tool_call>',
     'x<tool_call>{"name": "f", "arguments": {"a": [1}}</tool_call>', []),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1', '<tool_call>{"name": "f", '
     '"arguments": {"a": 1', []),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
     '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', []),
    ("llama3_json", '{"name": "f", "parameters": {"a": 1}}', "", [F1]),
    ("llama3_json", '<|python_tag|>{"type": "function", "name": "f", "parameters": {"a": 1}}; '
     '{"name": "g", "parameters": {}}', "", [F1, G0]),
    ("llama3_json", '{"a": 1}', '{"a": 1}', []),
    ("llama3_json", 'x {"name": "f", "parameters": {}}', 'x {"name": "f", "parameters": {}}', []),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}, '
     '"id": "123456789"}]', "", [F1, G0]),
    ("mistral", 'Ok[TOOL_CALLS]f{"a": 1}[TOOL_CALLS]g[ARGS]{}', "Ok", [F1, G0]),
    ("mistral", "[TOOL_CALLS]", "[TOOL_CALLS]", []),
    ("pythonic", "[f(a=1), g()]", "", [F1, G0]),
    ("pythonic", '[f(b="x]\\"", c=[true, {"k": None}], d=-1.5)]', "",
     [("f", '{"b": "x]\\"", "c": [true, {"k": null}], "d": -1.5}')]),
    ("pythonic", "[1, 2] are", "[1, 2] are", []),
    ("pythonic", "[f(1)]", "[f(1)]", []),
    ("pythonic", "[f(a=__import__('os'))]", "[f(a=__import__('os'))]", []),
    ("pythonic", "[f(a=1", "[f(a=1", []),
    ("pythonic", "[f(a=1e999)]", "[f(a=1e999)]", []),
    ("pythonic", "[" * 300 + "]" * 300, "[" * 300 + "]" * 300, []),
    ("llama4_pythonic", "<|python_start|>[f(a=1)]<|python_end|>", "", [F1]),
    ("llama4_pythonic", "[f(a=1)]", "", [F1]),
    ("deepseek_v3", f'Ok{FIRST}{BEGIN}function{SEP}f\n```json\n{{"a": 1}}\n```{END}\n'
     f"{BEGIN}function{SEP}g\n```json\n{{}}\n```{END}{LAST}", "Ok", [F1, G0]),
    ("deepseek_v31", f'{FIRST}{BEGIN}f{SEP}{{"a": 1}}{END}{BEGIN}g{SEP}{{}}{END}{LAST}', "",
     [F1, G0]),
    ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0"
     '<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|><|tool_calls_section_end|>', "", [F1]),
    ("granite", '<|tool_call|>[{"name": "f", "arguments": {"a": 1}}]', "", [F1]),
    ("jamba", '<tool_calls>[\n{"name": "f", "arguments": {"a": 1}},\n'
     '{"name": "g", "arguments": {}}\n]</tool_calls>', "", [F1, G0]),
    ("internlm", 'x<|action_start|><|plugin|>{"name": "f", "parameters": {"a": 1}}<|action_end|>',
     "x", [F1]),
    ("phi4_mini_json", 'functools[{"name": "f", "arguments": {"a": 1}}]', "", [F1]),
    ("llama3_function", '<function=f>{"a": 1}</function>', "", [F1]),
    ("qwen3_coder", "Ok\n<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n"
     "</tool_call>\n<tool_call>\n<function=g>\n<parameter=b>\n12\n3\n</parameter>\n</function>\n"
     "</tool_call>", "Ok", [F1, ("g", '{"b": "12\\n3"}')]),
    ("qwen3_coder", "<tool_call>x</tool_call>", "<tool_call>x</tool_call>", []),
    ("glm45", "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>", "",
     [F1]),
]  # fmt: skip


def formats(calls: str, reasoning: str = "none") -> AnswerFormats:
    return select_formats("", calls, reasoning)


def open_reader(form: AnswerFormats, use: ToolUse | None, prompt_end: str) -> AnswerReader | None:
    opener = select_reader(form, use, prompt_end)
    return opener and opener()


def read(
    form: AnswerFormats, pieces: Sequence[str], use: ToolUse = USE, prompt_end: str = ""
) -> list[AnswerPart]:
    reader = open_reader(form, use, prompt_end)
    assert reader is not None
    parts = [part for piece in pieces for part in reader.feed(piece)]
    return [*parts, *reader.finish()]


def comparable(answer: JoinedAnswer) -> tuple[str, str, list[tuple[str, str]]]:
    """The answer without the ids of its calls, which are random."""
    return answer.content, answer.reasoning, [(c.name, c.arguments) for c in answer.calls]


def joined(
    form: AnswerFormats, pieces: Sequence[str], use: ToolUse = USE, prompt_end: str = ""
) -> tuple[str, str, list[tuple[str, str]]]:
    return comparable(join_parts(read(form, pieces, use, prompt_end)))
