"""Fields of a request that nobody here knows: passed over and named, or refused with a hint."""

import logging
from collections.abc import Collection, Sequence
from difflib import get_close_matches

from services.runtime.errors import InvalidArgument

log = logging.getLogger(__name__)

MOST_REMEMBERED = 1024  # names that were told; what comes after them is not
MOST_NAMED = 16  # in one answer
MOST_CHARS = 64  # of each
ALIKE = 0.7  # of their letters, where one is taken for a misspelling of the other


class UnknownFields:
    """What to do with them; each name is told once in the log."""

    def __init__(self, refuses: bool = False):
        self._refuses = refuses
        self._told: set[str] = set()

    def pass_over(self, names: Sequence[str], known: Collection[str]) -> str:
        """The names as an answer's header gives them. Raises InvalidArgument where they are
        refused, with the field of `known` that was perhaps meant."""
        if not names:
            return ""
        if self._refuses:
            raise InvalidArgument(names[0][:MOST_CHARS], f"unknown field{_hint(names[0], known)}")
        for name in names[:MOST_NAMED]:
            self._tell(name, known)
        more = [f"and {len(names) - MOST_NAMED} more"] if len(names) > MOST_NAMED else []
        return ", ".join([*map(_plain, names[:MOST_NAMED]), *more])

    def _tell(self, name: str, known: Collection[str]) -> None:
        shown = _plain(name)
        if shown in self._told or len(self._told) >= MOST_REMEMBERED:
            return
        self._told.add(shown)
        hint = _hint(name, known)
        log.warning("requests bring a field %s, which is unknown here and ignored%s", shown, hint)


def _hint(name: str, known: Collection[str]) -> str:
    near = get_close_matches(name[:MOST_CHARS], known, 1, ALIKE)
    return f"; did you mean {near[0]}?" if near else ""


def _plain(name: str) -> str:
    """As a header can carry it."""
    cut = name[:MOST_CHARS]
    return "".join(c if c.isascii() and (c.isalnum() or c in "_.-[]") else "?" for c in cut)
