"""Unknown request fields: ignored and reported, or refused with a suggestion."""

import logging
from collections.abc import Collection, Sequence
from difflib import get_close_matches

from services.runtime.errors import InvalidArgument

log = logging.getLogger(__name__)

MAX_LOGGED = 1024  # different names; later ones are not logged
MAX_NAMED = 16  # in one answer
MAX_CHARS = 64  # of one name
SIMILARITY = 0.7  # of a name and the field that it misspells


class UnknownFields:
    """Handles unknown fields. Each name is logged once."""

    def __init__(self, refuses: bool = False):
        self._refuses = refuses
        self._logged: set[str] = set()

    def handle(self, names: Sequence[str], known: Collection[str]) -> str:
        """The value of the response header that lists them, empty for none. Raises InvalidArgument
        if unknown fields are refused, with the most similar field of `known`."""
        if not names:
            return ""
        if self._refuses:
            raise InvalidArgument(names[0][:MAX_CHARS], f"unknown field{_suggest(names[0], known)}")
        for name in names[:MAX_NAMED]:
            self._log_once(name, known)
        more = [f"and {len(names) - MAX_NAMED} more"] if len(names) > MAX_NAMED else []
        return ", ".join([*map(_sanitize, names[:MAX_NAMED]), *more])

    def _log_once(self, name: str, known: Collection[str]) -> None:
        shown = _sanitize(name)
        if shown in self._logged or len(self._logged) >= MAX_LOGGED:
            return
        self._logged.add(shown)
        suggestion = _suggest(name, known)
        log.warning("requests contain the unknown field %s, which is ignored%s", shown, suggestion)


def _suggest(name: str, known: Collection[str]) -> str:
    near = get_close_matches(name[:MAX_CHARS], known, 1, SIMILARITY)
    return f"; did you mean {near[0]}?" if near else ""


def _sanitize(name: str) -> str:
    """The name with characters that a header allows."""
    cut = name[:MAX_CHARS]
    return "".join(c if c.isascii() and (c.isalnum() or c in "_.-[]") else "?" for c in cut)
