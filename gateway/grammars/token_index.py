"""TokenIndex: how many tokens of a vocabulary a text needs at least. Pure."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from math import inf

SEPARATOR = b"\xff"  # in no text
LONGEST_TEXT = 96  # bytes of a text that are looked at: fewer need no more tokens


class TokenIndex:
    """Built once for a vocabulary, in O(bytes · log tokens)."""

    def __init__(self, tokens: Iterable[bytes]):
        self._tokens = frozenset(token for token in tokens if token)
        self._sorted = sorted(self._tokens)
        self._backwards = sorted(token[::-1] for token in self._tokens)
        self._joined = SEPARATOR.join(self._sorted)
        self.longest = max(map(len, self._tokens), default=1)

    def cover(self, text: bytes) -> int:
        """The fewest tokens of any longer text that contain a part of this text in it: the first
        may begin before it, the last may end behind it. At least 1. O(bytes · longest token)."""
        text = text[:LONGEST_TEXT]
        if text in self._joined:
            return 1
        sizes = range(1, min(len(text), self.longest) + 1)
        begun = [n for n in sizes if _any_begins(self._backwards, text[:n][::-1])]
        return self._count(text, dict.fromkeys(begun, 1), loose=True)

    def spell(self, text: bytes) -> int:
        """The fewest tokens that together are this text; at least 0."""
        return self._count(text[:LONGEST_TEXT], {0: 0}, loose=len(text) > LONGEST_TEXT)

    def _count(self, text: bytes, reached: dict[int, int], loose: bool) -> int:
        """The fewest tokens from one of the `reached` places, each with the tokens up to it, to the
        end of the text; `loose`: or beyond. 1 if the vocabulary cannot write it."""
        end, fewest = len(text), inf
        for at in range(end):
            if at in reached:
                count = reached[at] + 1
                if loose and _any_begins(self._sorted, text[at:]):
                    fewest = min(fewest, count)
                for to in range(at + 1, min(end, at + self.longest) + 1):
                    if text[at:to] in self._tokens:
                        reached[to] = min(reached.get(to, count), count)
        fewest = min(fewest, reached.get(end, inf))
        return 1 if fewest == inf else int(fewest)


def _any_begins(ascending: Sequence[bytes], text: bytes) -> bool:
    at = bisect_left(ascending, text)
    return at < len(ascending) and ascending[at].startswith(text)
