"""The formats in which models write tool calls, by vLLM's names of their parsers."""

from collections.abc import Mapping
from dataclasses import dataclass
from uuid import uuid4

from gateway.readers.json_calls import JsonCallReader, JsonCallSyntax, MakeId
from gateway.readers.patterns import compile_pattern, escape
from gateway.readers.whole_calls import (
    WholeCallReader,
    WholeCallSyntax,
    XmlCallSyntax,
    read_python_calls,
)
from gateway.types.answer_parts import AnswerReader
from gateway.types.tools import Tool, ToolUse

MISTRAL_ID_CHARS = 9  # what Mistral's templates accept


def make_call_id(name: str, index: int) -> str:
    return f"call_{uuid4().hex[:24]}"


def make_mistral_id(name: str, index: int) -> str:
    return uuid4().hex[:MISTRAL_ID_CHARS]


def make_kimi_id(name: str, index: int) -> str:
    return f"functions.{name}:{index}"


@dataclass(frozen=True)
class WrittenCalls:
    """How a model is made to write calls, with arguments that follow a schema."""

    opening: str  # before the first call
    before: str  # before the arguments, with NAME for the function's name
    after: str  # after the arguments
    separator: str  # between two calls
    closing: str = ""  # after the last call
    trigger: str = ""  # begins a call within free text; empty: no mark does


@dataclass(frozen=True)
class JsonCallFormat:
    """Calls with arguments that are a JSON object, read as they arrive."""

    syntaxes: tuple[JsonCallSyntax, ...]
    written: WrittenCalls
    begins: tuple[str, ...] = ()
    bare: bool = False  # a call may be the beginning of the answer, without a mark
    make_id: MakeId = make_call_id

    def open(self, tools: Mapping[str, Tool], parallel: bool) -> AnswerReader:
        return JsonCallReader(
            self.begins, self.bare, self.syntaxes, tools.keys(), parallel, self.make_id
        )


@dataclass(frozen=True)
class WholeCallFormat:
    """Calls that are read at once when they are complete. Forced calls are written as HERMES."""

    syntax: WholeCallSyntax

    @property
    def begins(self) -> tuple[str, ...]:
        return self.syntax.begins

    def open(self, tools: Mapping[str, Tool], parallel: bool) -> AnswerReader:
        return WholeCallReader(self.syntax, tools, parallel, make_call_id)


CallFormat = JsonCallFormat | WholeCallFormat


NAME = r'(?P<name>[^"\\]{1,256})'
# `{"name": "f", "arguments": {`, with what some models put before it.
OBJECT_HEAD = (
    rf' \{{ ("(id|type)" : "[^"\\]{{0,99}}" , )*"name" : "{NAME}" , "(arguments|parameters)" : \{{'
)
OBJECT_TAIL = r' (, "(id|type)" : "[^"\\]{0,99}" )*\}'
LIST_BETWEEN = compile_pattern(r" ((?P<more>[,;])|\])")


def _listed(*begins: str, end: str = "", bare: bool = False) -> JsonCallFormat:
    """One JSON object for each call, in a list or alone."""
    between = compile_pattern(rf" ((?P<more>[,;])|(\] )?{escape(end)})") if end else LIST_BETWEEN
    marked = "|".join(map(escape, begins))
    prefix = rf" ({marked})?" if bare and marked else ""
    head = compile_pattern(rf"{prefix} \[?{OBJECT_HEAD}")
    syntax = JsonCallSyntax(head, compile_pattern(OBJECT_TAIL), between)
    first = begins[0] if begins else ""
    trigger = "" if bare else first
    written = WrittenCalls(f"{first}[", OBJECT, "}", ", ", f"]{end}", trigger)
    return JsonCallFormat((syntax,), written, begins, bare)


OBJECT = '{"name": "NAME", "arguments": '
HERMES = JsonCallFormat(
    (
        JsonCallSyntax(
            compile_pattern(OBJECT_HEAD), compile_pattern(rf"{OBJECT_TAIL} </tool_call>")
        ),
    ),
    WrittenCalls("", f"<tool_call>\n{OBJECT}", "}\n</tool_call>", "\n", trigger="<tool_call>"),
    ("<tool_call>",),
)
LLAMA3_JSON = JsonCallFormat(
    (
        JsonCallSyntax(
            compile_pattern(rf" (<\|python_tag\|>)?{OBJECT_HEAD}"),
            compile_pattern(OBJECT_TAIL),
            compile_pattern(r" (?P<more>;)"),
        ),
    ),
    WrittenCalls("", '{"name": "NAME", "parameters": ', "}", "; "),
    ("<|python_tag|>",),
    bare=True,
)
MISTRAL = JsonCallFormat(
    (
        JsonCallSyntax(
            compile_pattern(rf" \[?{OBJECT_HEAD}"), compile_pattern(OBJECT_TAIL), LIST_BETWEEN
        ),
        JsonCallSyntax(
            compile_pattern(r" (?P<name>[\w.-]{1,256}) (\[CALL_ID\][\w-]{0,64} )?(\[ARGS\] )?\{"),
            compile_pattern(""),
        ),
    ),
    WrittenCalls("[TOOL_CALLS][", OBJECT, "}", ", ", "]", trigger="[TOOL_CALLS]"),
    ("[TOOL_CALLS]",),
    make_id=make_mistral_id,
)
CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END, SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
DEEPSEEK_BETWEEN = compile_pattern(f" ((?P<more>(?={CALL_BEGIN}))|{CALLS_END})")
DEEPSEEK_V3 = JsonCallFormat(
    (
        JsonCallSyntax(
            compile_pattern(
                rf" {CALL_BEGIN} function {SEP} (?P<name>[\w.-]{{1,256}})\n```json \{{"
            ),
            compile_pattern(f" ``` {CALL_END}"),
            DEEPSEEK_BETWEEN,
        ),
    ),
    WrittenCalls(
        CALLS_BEGIN,
        f"{CALL_BEGIN}function{SEP}NAME\n```json\n",
        f"\n```{CALL_END}",
        "\n",
        CALLS_END,
        trigger=CALLS_BEGIN,
    ),
    (CALLS_BEGIN,),
)
DEEPSEEK_V31 = JsonCallFormat(
    (
        JsonCallSyntax(
            compile_pattern(rf" {CALL_BEGIN} (?P<name>[\w.-]{{1,256}}) {SEP} \{{"),
            compile_pattern(f" {CALL_END}"),
            DEEPSEEK_BETWEEN,
        ),
    ),
    WrittenCalls(
        CALLS_BEGIN, f"{CALL_BEGIN}NAME{SEP}", CALL_END, "", CALLS_END, trigger=CALLS_BEGIN
    ),
    (CALLS_BEGIN,),
)
KIMI_BEGIN, KIMI_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
KIMI_K2 = JsonCallFormat(
    (
        JsonCallSyntax(
            compile_pattern(
                r" <\|tool_call_begin\|> (functions\.)?(?P<name>[\w-]{1,256})(:\d+)? "
                r"<\|tool_call_argument_begin\|> \{"
            ),
            compile_pattern(r" <\|tool_call_end\|>"),
            compile_pattern(rf" ((?P<more>(?=<\|tool_call_begin\|>))|{escape(KIMI_END)})"),
        ),
    ),
    WrittenCalls(
        KIMI_BEGIN,
        "<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        "",
        KIMI_END,
        trigger=KIMI_BEGIN,
    ),
    (KIMI_BEGIN,),
    make_id=make_kimi_id,
)
FUNCTION_TAG = JsonCallFormat(
    (
        JsonCallSyntax(
            compile_pattern(r"(?P<name>[\w.-]{1,256})> \{"), compile_pattern(" </function>")
        ),
    ),
    WrittenCalls("", "<function=NAME>", "</function>", "", trigger="<function="),
    ("<function=",),
)
PYTHONIC = WholeCallFormat(WholeCallSyntax((), read_python_calls, bare=True))
LLAMA4_PYTHONIC = WholeCallFormat(
    WholeCallSyntax(("<|python_start|>",), read_python_calls, bare=True, after="<|python_end|>")
)
QWEN3_XML = WholeCallFormat(
    WholeCallSyntax(
        ("<tool_call>",),
        XmlCallSyntax(
            compile_pattern(r" <function=(?P<name>[\w.-]{1,256})>"),
            compile_pattern(r"<parameter=(?P<key>[^>]{1,256})>\n?(?P<value>.*?)\n?</parameter>"),
            "</parameter>",
        ).read,
        end="</tool_call>",
    )
)
GLM_XML = WholeCallFormat(
    WholeCallSyntax(
        ("<tool_call>",),
        XmlCallSyntax(
            compile_pattern(r" (?P<name>[\w.-]{1,256})"),
            compile_pattern(
                r"<arg_key>(?P<key>[^<]{1,256})</arg_key> <arg_value>(?P<value>.*?)</arg_value>"
            ),
            "</arg_value>",
        ).read,
        end="</tool_call>",
    )
)
GRANITE = _listed("<|tool_call|>", "<tool_call>", bare=True)

CALL_FORMATS: Mapping[str, CallFormat] = {
    "hermes": HERMES,
    "llama3_json": LLAMA3_JSON,
    "llama4_json": LLAMA3_JSON,
    "llama3_function": FUNCTION_TAG,
    "pythonic": PYTHONIC,
    "llama4_pythonic": LLAMA4_PYTHONIC,
    "olmo3": PYTHONIC,
    "mistral": MISTRAL,
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v31": DEEPSEEK_V31,
    "kimi_k2": KIMI_K2,
    "granite": GRANITE,
    "granite-20b-fc": _listed("<function_call>"),
    "hunyuan_a13b": _listed("<tool_calls>", end="</tool_calls>"),
    "internlm": _listed("<|action_start|><|plugin|>", end="<|action_end|>"),
    "jamba": _listed("<tool_calls>", end="</tool_calls>"),
    "phi4_mini_json": _listed("functools"),
    "xlam": _listed("[TOOL_CALLS]", "<tool_call>", bare=True),
    "qwen3_coder": QWEN3_XML,
    "qwen3_xml": QWEN3_XML,
    "glm45": GLM_XML,
    "glm47": GLM_XML,
}
# Texts in chat templates and the format that they show; the first that is found counts.
TEMPLATE_MARKS: tuple[tuple[str, str], ...] = (
    ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>", "deepseek_v3"),
    (CALL_BEGIN + "function" + SEP, "deepseek_v3"),
    (CALLS_BEGIN, "deepseek_v31"),
    (KIMI_BEGIN, "kimi_k2"),
    ("<arg_key>", "glm45"),
    ("<function=example_function_name>", "qwen3_coder"),
    ("<parameter=", "qwen3_coder"),
    ("<|python_start|>", "llama4_pythonic"),
    ("<|action_start|><|plugin|>", "internlm"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|tool_call|>", "granite"),
    ("<tool_calls>", "jamba"),
    ("functools[", "phi4_mini_json"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama3_json"),
    ('"parameters": dictionary of argument name', "llama3_json"),
    ("[func_name1(", "pythonic"),
)


def find_call_format(chat_template: str) -> str:
    """The name of the format that a chat template shows; empty if there is none."""
    return next((name for mark, name in TEMPLATE_MARKS if mark in chat_template), "")


def open_call_reader(call_format: CallFormat, use: ToolUse) -> AnswerReader:
    """A reader of one answer's calls of the offered tools."""
    return call_format.open({tool.name: tool for tool in use.tools}, use.parallel)
