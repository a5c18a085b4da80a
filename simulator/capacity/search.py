"""Searches for the fewest workers and the largest rate: doubling, then bisection. Pure."""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, sqrt

MAX_TRIES = 12  # of a search for a rate
TOLERANCE = 0.05  # of a rate, at which the search for it ends


def find_fewest(keeps: Callable[[int], bool], most: int) -> int | None:
    """The fewest for which `keeps` holds, from 1 to `most`; None if it does not hold for `most`.

    The found number n keeps; n - 1 was tried and does not, unless n is 1. It is the fewest of all
    if `keeps` stays true once it is. At most 2 · ⌈log2 most⌉ + 1 tries.
    """
    below, found = 0, 1
    while not keeps(found):
        if found == most:
            return None
        below, found = found, min(2 * found, most)
    while found - below > 1:
        middle = (below + found) // 2
        if keeps(middle):
            found = middle
        else:
            below = middle
    return found


@dataclass(frozen=True, slots=True)
class RateLimit:
    """Requests per second. `kept` is the largest tried rate at which the SLA was kept, 0 if there
    was none; `missed` is the smallest one above it, infinite if the SLA was kept at all rates."""

    kept: float
    missed: float


def find_largest_rate(
    keeps: Callable[[float], bool], start: float, most: float, least: float = 0.0
) -> RateLimit:
    """The largest rate from `least` to `most` for which `keeps` holds, tried from `start` on.

    `kept` keeps, and `missed` does not; they enclose the largest rate of all if `keeps` stays false
    once it is. They are within TOLERANCE of each other, `least` is missed, or MAX_TRIES tries
    are used up.
    """
    kept, missed, rate = 0.0, inf, min(max(start, least), most)
    for _ in range(MAX_TRIES):
        if keeps(rate):
            kept = rate
        else:
            missed = rate
        if kept >= most or missed <= max(least, kept * (1 + TOLERANCE)):
            break
        if missed == inf:
            rate = min(2 * kept, most)
        elif kept == 0:
            rate = max(missed / 2, least)
        else:
            rate = sqrt(kept * missed)
    return RateLimit(kept, missed)
