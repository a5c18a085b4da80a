"""Lark grammars as llguidance reads them, and their pieces. Pure."""

import json
import re
from collections.abc import Iterator

from gateway.types.constraint import Pieces

Grammars = list[dict[str, object]]  # as llguidance serializes them

TEXT = "/(?s:.*)/"
ESCAPES = {"/": r"\/", "\n": r"\n"}
CONTROL = re.compile(r"[\x7f-\x9f]")


def read_grammars(text: str) -> Grammars:
    """The grammars of a serialized one, which may be Lark as it is."""
    try:
        grammars: Grammars = json.loads(text)["grammars"]
    except ValueError:
        return [{"lark_grammar": text}]
    return grammars


def quote(text: str) -> str:
    """A literal: JSON's, with the control characters escaped that JSON allows."""
    quoted = json.dumps(text, ensure_ascii=False)
    return CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", quoted)


def write_mark(mark: str | int) -> str:
    """A text as a literal, or a special token by its id."""
    return f"<[{mark}]>" if isinstance(mark, int) else quote(mark)


def write_pieces(pieces: Pieces) -> str:
    """Literals, adjacent texts in one; special tokens by their ids."""
    return " ".join(map(write_mark, _merge(pieces)))


def write_regex(pattern: str) -> str:
    """A regular expression between slashes."""
    escaped = re.sub(r"\\.|/|\n", lambda m: ESCAPES.get(m[0], m[0]), pattern, flags=re.DOTALL)
    return f"/{escaped}/"


def _merge(pieces: Pieces) -> Iterator[str | int]:
    text = ""
    for piece in pieces:
        if isinstance(piece, str):
            text += piece
            continue
        if text:
            yield text
        text = ""
        yield piece
    if text:
        yield text
