"""Suspects: the requests of a failed step, computed in parts until the faulty one is alone.

A failed step of n rows is computed in parts instead: its older half, then its newer half, and a
half that fails again in its own halves. Every row is in one part, so that each advances one step
while all parts are tried, and no other request runs meanwhile: a static batch stays in lockstep.
One faulty request costs log2(n) + 1 failed attempts, k of them at most k times that, and all
attempts together compute at most log2(n) + 1 steps.

Pure; inactive until a step fails.
"""

from services.worker.requests.types.sequence import Sequence


class Suspects:
    """The parts not computed yet, the next one last. Bounded by the rows of one step."""

    def __init__(self) -> None:
        self._parts: list[frozenset[Sequence]] = []

    def __bool__(self) -> bool:
        return bool(self._parts)

    def split(self, rows: list[Sequence]) -> None:
        """A step of these rows, or of the current part, has failed: its halves replace it."""
        self.pass_part()
        by_age = sorted(rows, key=lambda s: s.serial)
        half = (len(rows) + 1) // 2
        self._parts += [frozenset(by_age[half:]), frozenset(by_age[:half])]

    def pass_part(self) -> None:
        """The current part is done: computed, ended, or split."""
        if self._parts:
            self._parts.pop()

    def narrow(self, sequences: list[Sequence]) -> list[Sequence]:
        """Those of the current part; all rows without suspects."""
        if not self._parts:
            return sequences
        part = self._parts[-1]
        return [s for s in sequences if s in part]
