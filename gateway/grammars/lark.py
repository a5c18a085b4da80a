"""Literals of Lark grammars. Pure."""

import json
import re

CONTROL = re.compile(r"[\x7f-\x9f]")


def write_mark(mark: str | int) -> str:
    """A text as a literal of Lark, or a special token by its id."""
    if isinstance(mark, int):
        return f"<[{mark}]>"
    quoted = json.dumps(mark, ensure_ascii=False)
    return CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", quoted)  # JSON allows them
