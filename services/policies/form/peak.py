"""The largest memory that a batch will need, given each request's remaining length."""

from collections.abc import Callable

import numpy as np

from services.forecast import Floats

Statistic = Callable[[Floats], float]  # over the peaks of several scenarios


def mean(peaks: Floats) -> float:
    return float(peaks.mean())


def largest(peaks: Floats) -> float:
    return float(peaks.max())


class PrefixPeaks:
    """M* of running requests plus the first k queued ones, as a statistic over scenarios; it must
    rise with each scenario's peak.

    M* (Past-Future, Eq. 2–4) is the most tokens held while all requests run to their end. Sorted by
    remaining tokens, descending, the batch holds Σ_{j≤i} held_j + i·remaining_i when the i-th ends,
    after all later ones have ended; the peak is the largest of these. 0 without requests.
    `held` is (n,) and `remaining` (scenarios, n), the running first. Sorted once; each prefix is
    then one masked pass, O(scenarios · n), and cached.
    """

    def __init__(self, running: int, held: Floats, remaining: Floats, statistic: Statistic = mean):
        self._running = running
        self._statistic = statistic
        self._order = np.argsort(-remaining, axis=1)
        self._held = held[self._order]
        self._remaining = np.take_along_axis(remaining, self._order, axis=1)
        self._known: dict[int, float] = {}

    def __call__(self, queued: int) -> float:
        """The peak with the first `queued` admitted; monotonic in it."""
        if queued not in self._known:
            self._known[queued] = self._peak(queued)
        return self._known[queued]

    def longest(self, most: int, limit: float) -> int:
        """The largest k ≤ `most` whose peak is within the limit; 0 without one.

        Peaks are close to linear in k. Interpolation finds the neighbourhood; halving at every
        other step keeps the worst case logarithmic: about five passes over the rows.
        """
        if most == 0 or self(most) <= limit:
            return most
        if self(0) > limit:
            return 0
        low, high = 0, most  # peak(low) ≤ limit < peak(high)
        halve = False
        while high - low > 1:
            share = 0.5 if halve else (limit - self(low)) / (self(high) - self(low))
            middle = low + min(max(1, round(share * (high - low))), high - low - 1)
            low, high = (middle, high) if self(middle) <= limit else (low, middle)
            halve = not halve
        return low

    def _peak(self, queued: int) -> float:
        among = self._order < self._running + queued
        total = np.cumsum(self._held * among, axis=1) + np.cumsum(among, axis=1) * self._remaining
        # A row outside the prefix may keep its total: it is at most that of the last member before
        # it, which holds as much and runs at least as long, or 0 without one.
        return self._statistic(total.max(axis=1, initial=0.0))
