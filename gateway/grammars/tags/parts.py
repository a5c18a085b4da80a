"""The parts of an answer with structural tags, into which formats are read. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Mark = str | int  # a text that is not empty, or the id of a special token


@dataclass(frozen=True, slots=True)
class Marks:
    """One of several marks."""

    choices: Sequence[Mark]


@dataclass(frozen=True, slots=True)
class Text:
    """Text in which none of `excludes` occurs, up to the marks that follow it."""

    excludes: Sequence[str] = ()
    max_chars: int | None = None


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Text in which each of some marks is followed by its part, up to the marks that follow it."""

    text: Text
    parts: Mapping[Mark, "Part"]
    repeated: bool = True  # text goes on after a part; else nothing does
    needed: bool = False  # a mark comes first


@dataclass(frozen=True, slots=True)
class Schema:
    """JSON that follows a schema; `whitespace` as in `Constraint`."""

    schema: bool | Mapping[str, object]
    whitespace: str | None


@dataclass(frozen=True, slots=True)
class Regex:
    source: str


@dataclass(frozen=True, slots=True)
class Grammar:
    source: str  # EBNF or Lark


@dataclass(frozen=True, slots=True)
class Row:
    """Parts one after the other; none of them is a row."""

    parts: Sequence["Part"] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    parts: Sequence["Part"]


@dataclass(frozen=True, slots=True)
class Repeat:
    """A part that is not open, `least` to `most` times; None: any number."""

    part: "Part"
    least: int
    most: int | None


Part = Marks | Text | Dispatch | Schema | Regex | Grammar | Row | Choice | Repeat


def is_open(part: Part) -> bool:
    """Whether what follows a part ends it. O(depth)."""
    match part:
        case Text() | Dispatch():
            return True
        case Choice(parts):
            return any(map(is_open, parts))
        case Row(parts):
            return bool(parts) and is_open(parts[-1])
    return False
