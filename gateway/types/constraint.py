"""`Constraint`: what an answer must follow, as the client wrote it."""

from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from hashlib import sha256

JSON_OBJECT = '{"type":"object"}'  # the schema of any JSON object


class ConstraintKind(StrEnum):
    """The language of a constraint's source."""

    JSON_SCHEMA = "json_schema"  # JSON text
    REGEX = "regex"
    CHOICE = "choice"  # JSON text of a list of strings
    GRAMMAR = "grammar"  # Lark, or EBNF as GBNF and XGrammar write it
    STRUCTURAL_TAG = "structural_tag"  # JSON text: `structures` and `triggers`


@dataclass(frozen=True)
class Constraint:
    """A constraint on one answer, not yet compiled. Equal ones have one grammar."""

    kind: ConstraintKind
    source: str = field(repr=False)
    # A regex of the whitespace where JSON allows some; empty: none; None: the server's default.
    whitespace: str | None = None
    field_name: str = field(default="", compare=False)  # the field to name in errors

    @cached_property
    def digest(self) -> bytes:
        """Names the constraint in caches and forecasts."""
        parts = (self.kind, repr(self.whitespace), self.source)
        return sha256("\0".join(parts).encode(errors="surrogatepass")).digest()

    @property
    def size_bytes(self) -> int:
        return len(self.source.encode(errors="surrogatepass"))
