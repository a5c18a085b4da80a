"""The formats with an XML element for each argument, by vLLM's names of their parsers."""

from collections.abc import Mapping

from gateway.readers.calls.kinds import WrittenArguments, WrittenCalls, XmlCallFormat
from gateway.readers.calls.xml_reader import XmlCallSyntax
from gateway.readers.patterns import compile_pattern, escape

NAME = r"(?P<name>[\w.:-]{1,256})"


def _qwen(begin: str, end: str) -> XmlCallFormat:
    """`<function=NAME>` and `<parameter=KEY>` between two marks, of which models may forget one."""
    argument = rf" (<parameter=(?P<key>[^>]{{1,256}})>|(</function> )?{escape(end)})"
    close, early = "</parameter>", ("<parameter=", "</function>")
    return XmlCallFormat(
        XmlCallSyntax(
            compile_pattern(rf" (<function=)?{NAME}>"),
            compile_pattern(argument),
            close,
            early,
            True,
        ),
        WrittenCalls(
            "",
            f"{begin}\n<function=NAME>\n",
            f"</function>\n{end}",
            "\n",
            trigger=begin,
            unwritten=("<function=",),
            arguments=WrittenArguments(
                "<parameter=KEY>\n",
                f"\n{close}\n",
                not_text=rf"(?s:(.*\n)?({'|'.join((close, *early))}).*)",
            ),
        ),
        (begin, "<function="),
    )


def _glm(blank: str) -> XmlCallFormat:
    """Keys and values in elements of their own, with `blank` between them."""
    close, end = "</arg_value>", "</tool_call>"
    argument = rf" (<arg_key>(?P<key>[^<]{{1,256}})</arg_key> <arg_value>|{end})"
    return XmlCallFormat(
        # The name ends where the first key or the call's end begins.
        XmlCallSyntax(compile_pattern(rf" {NAME} (?=<)"), compile_pattern(argument), close),
        WrittenCalls(
            "",
            f"<tool_call>NAME{blank}",
            end,
            "\n",
            trigger="<tool_call>",
            arguments=WrittenArguments(
                f"<arg_key>KEY</arg_key>{blank}<arg_value>",
                f"{close}{blank}",
                not_text=f"(?s:.*{close}.*)",
            ),
        ),
        ("<tool_call>",),
    )


def _invoked(begin: str, end: str, prefix: str, attribute: str = "") -> XmlCallFormat:
    """`invoke` elements with `parameter` elements between two marks. `attribute`: tells whether a
    value is text."""
    invoke, parameter = f"{prefix}invoke", f"{prefix}parameter"
    told = rf'( {attribute}="(?P<text>true|false)")?' if attribute else ""
    argument = rf' (<{parameter} name="(?P<key>[^"]{{1,256}})"{told} >|</{invoke}>)'
    shown = f' {attribute}="IS_TEXT"' if attribute else ""
    close = f"</{parameter}>"
    return XmlCallFormat(
        XmlCallSyntax(
            compile_pattern(rf' <{invoke} name="{NAME}" >'),
            compile_pattern(argument),
            close,
            tells_text=bool(attribute),
            between=compile_pattern(rf" ((?P<more>(?=<{invoke}))|{escape(end)})"),
        ),
        WrittenCalls(
            f"{begin}\n",
            f'<{invoke} name="NAME">\n',
            f"</{invoke}>\n",
            "",
            end,
            trigger=begin,
            arguments=WrittenArguments(
                f'<{parameter} name="KEY"{shown}>', f"{close}\n", not_text=f"(?s:.*{close}.*)"
            ),
        ),
        (begin,),
    )


QWEN = _qwen("<tool_call>", "</tool_call>")
GLM45 = _glm("\n")
DSML = "｜DSML｜"
XML_FORMATS: Mapping[str, XmlCallFormat] = {
    "qwen3_coder": QWEN,
    "qwen3_xml": QWEN,
    "step3p5": QWEN,
    "seed_oss": _qwen("<seed:tool_call>", "</seed:tool_call>"),
    "glm45": GLM45,
    "glm47": _glm(""),
    "minimax_m2": _invoked("<minimax:tool_call>", "</minimax:tool_call>", ""),
    "deepseek_v32": _invoked(f"<{DSML}function_calls>", f"</{DSML}function_calls>", DSML, "string"),
    "deepseek_v4": _invoked(f"<{DSML}tool_calls>", f"</{DSML}tool_calls>", DSML, "string"),
}
