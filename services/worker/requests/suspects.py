"""Suspects: the requests of a failed step, computed in parts until the faulty one is isolated.

A failed step of n rows is computed in two parts: the older half, then the newer half. A half that
fails is split again. Every row is in one part, so that each advances by one step while all parts
are computed. No other request runs meanwhile, so that a static batch stays in lockstep. One faulty
request costs log2(n) + 1 failed attempts, k of them at most k times that, and all attempts together
compute at most log2(n) + 1 steps.

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
        """Replaces the failed step, or the current part, by its halves."""
        self.pass_part()
        by_age = sorted(rows, key=lambda s: s.serial)
        half = (len(rows) + 1) // 2
        self._parts += [frozenset(by_age[half:]), frozenset(by_age[:half])]

    def pass_part(self) -> None:
        """Removes the current part, which was computed, ended, or split."""
        if self._parts:
            self._parts.pop()

    def narrow(self, sequences: list[Sequence]) -> list[Sequence]:
        """The sequences of the current part; all sequences without suspects."""
        if not self._parts:
            return sequences
        part = self._parts[-1]
        return [s for s in sequences if s in part]
