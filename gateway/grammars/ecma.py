"""Regular expressions of JSON schemas, which are ECMA-262's, as llguidance reads them. Pure.

The two dialects give other meanings to some of the same texts. Those are written differently here,
or are a fault.
"""

import re
from collections.abc import Iterator

from gateway.grammars.faults import GrammarFault

PART = re.compile(r"\\(u\{|x\{|.)|\(\?([A-Za-z-]+)[:)]|\[\^?\]?|.", re.DOTALL)
ANY = r"[^\n\r\x{2028}\x{2029}]"  # `.`: llguidance excludes the newline only
SPACES, NO_SPACES = r"\s\x{FEFF}", r"[^\s\x{FEFF}]"
LETTERS = frozenset("bBcdDfnkpPrsStuvwWx")  # that may follow a backslash
OPERATORS = frozenset("[&~")  # in a class; in ECMA-262 they are characters


def translate_pattern(pattern: str) -> str:
    """A pattern of the same meaning. Raises GrammarFault. O(length)."""
    return "".join(_translate(pattern))


def _translate(pattern: str) -> Iterator[str]:
    in_class, before = False, ""
    for match in PART.finditer(pattern):
        part, escaped, flags = match[0], match[1], match[2]
        if escaped is not None:
            yield _escape(part, escaped, in_class)
        elif in_class and part[0] == "[":
            yield "\\" + part.rstrip("]")
            in_class = part[-1] != "]"
            if not in_class:
                yield "]"
        elif in_class:
            yield f"\\{part}" if part in OPERATORS or part == before == "-" else part
            in_class = part != "]"
        elif part[0] == "[":
            if part[-1] == "]":
                raise GrammarFault(f"the character class {part} of a pattern is not supported")
            in_class = True
            yield part
        elif flags and flags != "i":
            raise GrammarFault(f"the flags {part[:20]} of a pattern are not supported")
        else:
            yield ANY if part == "." else part
        before = part


def _escape(part: str, escaped: str, in_class: bool) -> str:
    if escaped == "x{" or (escaped.isascii() and escaped.isalpha() and escaped not in LETTERS):
        raise GrammarFault(f"{part} in a pattern is not defined by ECMA-262")
    if escaped == "s":
        return SPACES if in_class else f"[{SPACES}]"
    return NO_SPACES if escaped == "S" else part
