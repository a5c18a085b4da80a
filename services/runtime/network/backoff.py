"""Exponential backoff."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backoff:
    """Delays between attempts, doubling from `first_s` to `longest_s`."""

    first_s: float
    longest_s: float

    def after_s(self, failures: int) -> float:
        return min(self.longest_s, self.first_s * 2.0 ** min(failures, 30))
