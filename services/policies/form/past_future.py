"""Past-Future's rule (Gong et al., ASPLOS 2025): the future memory peak, over sampled lengths."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np

from services.forecast import Floats, Ints
from services.policies.form.demand import Demand, Need, WorkerQueues, needed_tokens
from services.policies.form.lines import Lines
from services.policies.parameters import Param, Params, named

ENOUGH_DRAWS = 200  # sampled lengths of running requests above which another scenario adds little
MAX_SCENARIOS = 5
Statistic = Callable[[Floats], float]  # over the peaks of several scenarios


def mean(peaks: Floats) -> float:
    return float(peaks.mean())


def largest(peaks: Floats) -> float:
    return float(peaks.max())


STATISTICS: dict[str, Statistic] = {"mean": mean, "largest": largest}


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

    def count_fitting(self, most: int, limit: float) -> int:
        """The largest k ≤ `most` with a peak within the limit; 0 without one.

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


@dataclass(frozen=True, slots=True)
class PeakDemand(Demand):
    """`remaining`, (scenarios, jobs) for each queue, are the tokens that each of its jobs will
    still make. The statistic of the scenarios' peaks must fit. Each queue is looked at alone."""

    remaining: Sequence[Floats]
    statistic: Statistic = mean

    def count_fitting(self, lines: Lines, base: Ints, most: Ints) -> tuple[Ints, Need]:
        fits, peaks, first = np.zeros(len(base), np.int64), [], 0
        columns = (lines.starts, lines.sizes, base, most, self.limits)
        each = zip(self.remaining, *(column.tolist() for column in columns), strict=True)
        for nth, (remaining, start, size, kept, room, limit) in enumerate(each):
            # Considers only as many requests as could fit without growth, or the one that is
            # admitted regardless, and one more to explain.
            jobs = lines.jobs[start : start + size]
            held = np.cumsum(self.held[jobs])
            room = min(room, max(0, int(np.searchsorted(held, limit, side="right")) - kept))
            jobs = jobs[: kept + max(1, room) + 1]
            own = remaining[:, jobs - first]
            peaks.append(PrefixPeaks(kept, self.held[jobs], own, self.statistic))
            fits[nth] = peaks[-1].count_fitting(room, limit)
            first += remaining.shape[1]

        def need(count: Ints) -> Floats:
            pairs = zip(peaks, count.tolist(), strict=True)
            return np.array([peak(queued) for peak, queued in pairs])

        return fits, need


def past_future(queues: WorkerQueues, params: Params, rng: np.random.Generator) -> Demand:
    """The future peak M* fits in (1 − `reserved`) · capacity (Past-Future, §3, Algorithm 1;
    `reserved` 0.03 to 0.10).

    Each length is sampled from L | L > generated, `draws` times. One sample of a small batch
    says little; the paper repeats it there without giving a number: 0 samples until jobs ×
    scenarios reach 200, at most 5 times. The paper does not say which of the peaks decides:
    `statistic` is their mean or the largest.
    """
    jobs, remaining = queues.jobs, []
    for start, size in zip(queues.lines.starts.tolist(), queues.lines.sizes.tolist(), strict=True):
        own = jobs.select(np.arange(start, start + size))
        enough = min(MAX_SCENARIOS, ceil(ENOUGH_DRAWS / max(1, size)))
        scenarios = int(params["draws"]) or enough
        lengths = queues.forecasts.sample(rng, own.forecast, own.output, own.cap, scenarios)
        remaining.append(np.maximum(lengths - own.output, 0.0))
    limits = (1 - params["reserved"]) * queues.rooms
    statistic = list(STATISTICS.values())[int(params["statistic"])]
    return PeakDemand(needed_tokens(queues), limits, remaining, statistic)


PARAMS = {
    "reserved": Param(0.05, 0.0, 1.0),
    "draws": Param(0, 0, 64),
    "statistic": named(*STATISTICS),
}
