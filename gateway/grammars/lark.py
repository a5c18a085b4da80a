"""Lark grammars, as llguidance reads them. Pure."""

import json
import re

Grammars = list[dict[str, object]]  # as llguidance serializes them
CONTROL = re.compile(r"[\x7f-\x9f]")


def write_mark(mark: str | int) -> str:
    """A text as a literal of Lark, or a special token by its id."""
    if isinstance(mark, int):
        return f"<[{mark}]>"
    quoted = json.dumps(mark, ensure_ascii=False)
    return CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", quoted)  # JSON allows them


def read_grammars(text: str) -> Grammars:
    """The grammars of a serialized one, which may be Lark as it is."""
    try:
        grammars: Grammars = json.loads(text)["grammars"]
    except ValueError:
        return [{"lark_grammar": text}]
    return grammars
