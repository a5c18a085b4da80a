"""EBNF, as GBNF and XGrammar write it, to Lark grammars. Pure."""

import re

from llguidance.gbnf_to_lark import gbnf_to_lark

RULE = re.compile(r"(?m)^\s*[\w-]+\s*::=")
# An escape of one character, or any other escape, so that `\\u0041` stays a backslash and a text.
ESCAPE = re.compile(r"\\u([0-9A-Fa-f]{4})|\\U([0-9A-Fa-f]{8})|\\.", re.DOTALL)
FIRST_OUTSIDE_ASCII = 0x80


def is_ebnf(grammar: str) -> bool:
    """Whether a grammar is EBNF and not Lark: a line begins with `name ::=`."""
    return RULE.search(grammar) is not None


def ebnf_to_lark(grammar: str) -> str:
    """The grammar in Lark's syntax. Raises llguidance's error for a mistake in it."""
    return gbnf_to_lark(ESCAPE.sub(_write_character, grammar))


def _write_character(match: re.Match[str]) -> str:
    """`\\uXXXX` as the character, or as `\\xXX` in ASCII: llguidance's converter removes leading
    zeros, which Lark needs."""
    digits = match[1] or match[2]
    if digits is None:
        return match[0]
    code = int(digits, 16)
    if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
        return match[0]
    return f"\\x{code:02x}" if code < FIRST_OUTSIDE_ASCII else chr(code)
