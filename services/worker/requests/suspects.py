"""Suspects: who stood in a step that broke, tried in parts until what broke it is alone.

A step of n rows that fails is computed in parts instead: its elder half, then its newer half, and
a half that fails again in its own halves. Every row is in one part, so each gets on by one step
while all parts are tried, and nobody else runs meanwhile: whoever computes together (a static
batch) is together again behind it. One culprit costs log2(n) + 1 failed tries, k of them at most
k times that, and all tries together compute no more than log2(n) + 1 steps would.

Pure; while nothing has failed, nothing here is asked anything.
"""

from services.worker.requests.sequence import Sequence


class Suspects:
    """The parts not computed yet, the next to be tried last. Bounded by the rows of one step."""

    def __init__(self) -> None:
        self._parts: list[frozenset[Sequence]] = []

    def __bool__(self) -> bool:
        return bool(self._parts)

    def split(self, rows: list[Sequence]) -> None:
        """A step of these, or the part that they were, has failed: its halves take its place."""
        self.pass_part()
        by_age = sorted(rows, key=lambda s: s.serial)
        half = (len(rows) + 1) // 2
        self._parts += [frozenset(by_age[half:]), frozenset(by_age[:half])]

    def pass_part(self) -> None:
        """The part that was to be tried is over: computed, ended, or split."""
        if self._parts:
            self._parts.pop()

    def narrow(self, sequences: list[Sequence]) -> list[Sequence]:
        """Those of the part to be tried next; all, where nobody is suspected."""
        if not self._parts:
            return sequences
        part = self._parts[-1]
        return [s for s in sequences if s in part]
