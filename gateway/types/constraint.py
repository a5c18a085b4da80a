"""`Constraint`: what an answer must follow, as the client wrote it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from hashlib import sha256
from typing import NamedTuple, TypedDict

Pieces = Sequence[str | int]
JSON_OBJECT = '{"type":"object"}'  # the schema of any JSON object


class CompiledGrammar(NamedTuple):
    """A compiled constraint. `text` is serialized by llguidance."""

    text: str
    least_tokens: int = 0  # of an answer, without the end


class ConstraintKind(StrEnum):
    """The language of a constraint's source."""

    JSON_SCHEMA = "json_schema"  # JSON text
    REGEX = "regex"
    CHOICE = "choice"  # JSON text of a list of strings
    GRAMMAR = "grammar"  # Lark, or EBNF as GBNF and XGrammar write it
    STRUCTURAL_TAG = "structural_tag"  # JSON text: a format of XGrammar's
    TOOL_CALLS = "tool_calls"  # JSON text: the fields of `CallsSource`


class CallsSource(TypedDict):
    """Calls of tools, each with arguments that follow a schema. A piece is a text or, for a special
    token, its id."""

    calls: Sequence["CallSource"]
    opening: Pieces  # before the first call
    end: Pieces  # of each call
    separator: Pieces
    closing: Pieces  # after the last call
    parallel: bool  # the answer may have more than one call
    # Free text, in which this begins a call (`each_begins`) or the opening; empty: only calls.
    trigger: Pieces
    each_begins: bool
    answer: "SourceOf | None"  # what the answer may follow instead


class CallSource(TypedDict):
    """One tool of `CallsSource`."""

    name: str
    begin: Pieces  # up to the arguments
    schema: Mapping[str, object]


class SourceOf(TypedDict):
    """A constraint within another."""

    kind: str
    source: str
    whitespace: str | None


@dataclass(frozen=True)
class Constraint:
    """A constraint on one answer, not yet compiled. Equal ones have one grammar."""

    kind: ConstraintKind
    source: str = field(repr=False)
    # A regex of the whitespace where JSON allows some; empty: none; None: the server's default.
    whitespace: str | None = None
    field_name: str = field(default="", compare=False)  # the field to name in errors
    after: Pieces = ()  # free text up to this and with it comes first; empty: none

    @cached_property
    def digest(self) -> bytes:
        """Names the constraint in caches and forecasts."""
        parts = (self.kind, repr(self.whitespace), repr([*self.after]), self.source)
        return sha256("\0".join(parts).encode(errors="surrogatepass")).digest()

    @property
    def size_bytes(self) -> int:
        return len(self.source.encode(errors="surrogatepass"))
