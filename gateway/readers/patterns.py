"""Patterns that tell whether more text could complete a match."""

from collections.abc import Iterator
from typing import Protocol, cast

import regex


class Found(Protocol):
    """A match, or with `partial` the beginning of one that reaches the end of the text."""

    @property
    def partial(self) -> bool: ...
    def __getitem__(self, group: str) -> str: ...
    def group(self, group: str) -> str | None: ...
    def end(self) -> int: ...


class Pattern(Protocol):
    """A compiled pattern of the module regex, which has no types."""

    @property
    def pattern(self) -> str: ...
    def match(self, text: str, *, partial: bool = False) -> Found | None: ...
    def finditer(self, text: str, pos: int, endpos: int) -> Iterator[Found]: ...


def compile_pattern(pattern: str) -> Pattern:
    """A pattern in which a blank is all whitespace at its place, and `.` any character. Blanks do
    not backtrack: several of them would take a power of the time."""
    return cast(Pattern, regex.compile(pattern.replace(" ", r"\s*+"), regex.DOTALL))


def escape(text: str) -> str:
    """A pattern of the text itself."""
    return str(regex.escape(text))
