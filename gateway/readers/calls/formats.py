"""The formats in which models write tool calls, by vLLM's names of their parsers."""

from collections.abc import Mapping
from dataclasses import replace

from gateway.readers.calls.ids import make_kimi_id, make_mistral_id
from gateway.readers.calls.json_reader import JsonCallSyntax
from gateway.readers.calls.kinds import (
    CallFormat,
    ChannelCallFormat,
    JsonCallFormat,
    PythonCallFormat,
    WrittenArguments,
    WrittenCalls,
    WrittenChannels,
)
from gateway.readers.calls.xml_formats import XML_FORMATS
from gateway.readers.patterns import compile_pattern, escape

NAME = r'(?P<name>[^"\\]{1,256})'
# `{"name": "f", "arguments": {`, with what some models put before it.
OBJECT_HEAD = (
    rf' \{{ ("(id|type)" : "[^"\\]{{0,99}}" , )*"name" : "{NAME}" , '
    r'"(arguments|parameters)" : (?=\{)'
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
    beginning = r" (\[ )?\{" if bare else ""
    written = WrittenCalls(f"{first}[", OBJECT, "}", ", ", f"]{end}", trigger=first, bare=beginning)
    return JsonCallFormat((syntax,), written, begins)


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
    WrittenCalls("", '{"name": "NAME", "parameters": ', "}", "; ", bare=r" \{"),
    ("<|python_tag|>",),
)
MISTRAL = JsonCallFormat(
    (
        JsonCallSyntax(
            compile_pattern(rf" \[?{OBJECT_HEAD}"), compile_pattern(OBJECT_TAIL), LIST_BETWEEN
        ),
        JsonCallSyntax(
            compile_pattern(
                r" (?P<name>[\w.:-]{1,256}) (\[CALL_ID\][\w-]{0,64} )?(\[ARGS\] )?(?=\{)"
            ),
            compile_pattern(""),
        ),
    ),
    WrittenCalls("[TOOL_CALLS][", OBJECT, "}", ", ", "]", trigger="[TOOL_CALLS]"),
    ("[TOOL_CALLS]",),
    make_id=make_mistral_id,
)
# As Mistral's models write since version 11 of its tokenizers.
MISTRAL_V11 = replace(
    MISTRAL,
    written=WrittenCalls("", "[TOOL_CALLS]NAME[ARGS]", "", "", trigger="[TOOL_CALLS]"),
)
CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END, SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
DEEPSEEK_BETWEEN = compile_pattern(f" ((?P<more>(?={CALL_BEGIN}))|{CALLS_END})")
DEEPSEEK_V3 = JsonCallFormat(
    (
        JsonCallSyntax(
            compile_pattern(
                rf" {CALL_BEGIN} function {SEP} (?P<name>[\w.:-]{{1,256}})\n```json (?=\{{)"
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
            compile_pattern(rf" {CALL_BEGIN} (?P<name>[\w.:-]{{1,256}}) {SEP} (?=\{{)"),
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
                r" <\|tool_call_begin\|> (functions\.)?(?P<name>[\w.:-]{1,256}?)(:\d+)? "
                r"<\|tool_call_argument_begin\|> (?=\{)"
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
            compile_pattern(r"(?P<name>[\w.:-]{1,256})> (?=\{)"), compile_pattern(" </function>")
        ),
    ),
    WrittenCalls("", "<function=NAME>", "</function>", "", trigger="<function="),
    ("<function=",),
)
PYTHON = WrittenCalls(
    "[",
    "NAME(",
    ")",
    ", ",
    "]",
    arguments=WrittenArguments("KEY=", "", ", "),
    bare=r" \[ (NAMES) \(",
)
PYTHONIC = PythonCallFormat(PYTHON)
LLAMA4_PYTHONIC = PythonCallFormat(PYTHON, ("<|python_start|>",), "<|python_end|>")
NEXT = "<|end|><|start|>assistant"
HARMONY = ChannelCallFormat(
    WrittenCalls(
        "",
        "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>",
        "",
        "",
        channels=WrittenChannels(
            ("<|channel|>analysis<|message|>", "<|channel|>commentary<|message|>"),
            NEXT,
            "<|channel|>final<|message|>",
        ),
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
    "mistral_v11": MISTRAL_V11,
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
    **XML_FORMATS,
    "openai": HARMONY,
}
# Texts in chat templates and the format that they show; the first that is found counts.
CALL_MARKS: tuple[tuple[str, str], ...] = (
    ("<|channel|>analysis<|message|>", "openai"),
    ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>", "deepseek_v3"),
    (CALL_BEGIN + "function" + SEP, "deepseek_v3"),
    (CALLS_BEGIN, "deepseek_v31"),
    (KIMI_BEGIN, "kimi_k2"),
    ("<｜DSML｜function_calls>", "deepseek_v32"),
    ("<｜DSML｜tool_calls>", "deepseek_v4"),
    ("<minimax:tool_call>", "minimax_m2"),
    ("<seed:tool_call>", "seed_oss"),
    ("</arg_key>\\n<arg_value>", "glm45"),
    ("<arg_key>", "glm47"),
    ("<function=example_function_name>", "qwen3_coder"),
    ("<parameter=", "qwen3_coder"),
    ("<|python_start|>", "llama4_pythonic"),
    ("<|action_start|><|plugin|>", "internlm"),
    ("[ARGS]", "mistral_v11"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|tool_call|>", "granite"),
    ("<tool_calls>", "jamba"),
    ("functools[", "phi4_mini_json"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama3_json"),
    ('"parameters": dictionary of argument name', "llama3_json"),
    ("[func_name1(", "pythonic"),
)
