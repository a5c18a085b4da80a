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
    mark: Pieces  # before the first call, or with `each_marked` before each; may be empty
    each_marked: bool
    opening: Pieces  # from the mark to the first call
    end: Pieces  # of each call
    separator: Pieces
    closing: Pieces  # after the last call
    arguments: "ArgumentsSource | None"  # None: a JSON object
    parallel: bool  # the answer may have more than one call
    channels: "ChannelsSource | None"  # messages before the calls, or in place of them
    free: "FreeText | None"  # around the calls; None: only calls
    answer: "SourceOf | None"  # what the answer may follow instead


class CallSource(TypedDict):
    """One tool of `CallsSource`."""

    name: str
    begin: Pieces  # from the mark or the last separator to the arguments
    schema: Mapping[str, object]


class ArgumentsSource(TypedDict):
    """Arguments that are written one by one."""

    before: Pieces  # a value, with KEY for its key, and IS_TEXT for `true` or `false`
    after: Pieces  # a value
    separator: Pieces  # between two arguments
    # A regular expression of what a text, which is written as it is, cannot be; empty: strings are
    # quoted.
    not_text: str


class ChannelsSource(TypedDict):
    """Messages in which an answer is written, one after another."""

    thoughts: Sequence[Pieces]  # the beginnings of those before the last
    end: Pieces  # of those before the last
    final: Pieces  # the beginning of the last, if it is no call


class FreeText(TypedDict):
    """Text in which calls may begin."""

    triggers: Sequence[Pieces]  # the marks that begin calls
    never: Sequence[str]  # what it does not contain
    bare: str  # a regular expression of the beginnings of answers that are calls; empty: none


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
