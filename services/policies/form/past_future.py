"""Past-Future's rule (Gong et al., ASPLOS 2025): the future memory peak, over sampled lengths."""

from dataclasses import dataclass
from math import ceil

import numpy as np

from services.forecast import Floats, Ints
from services.policies.form.demand import Demand, Need, WorkerQueue, needed
from services.policies.form.peak import PrefixPeaks, Statistic, largest, mean
from services.policies.parameters import Param, Params, named

ENOUGH_DRAWS = 200  # sampled lengths of running requests above which another scenario adds little
MAX_SCENARIOS = 5
STATISTICS: dict[str, Statistic] = {"mean": mean, "largest": largest}


@dataclass(frozen=True, slots=True)
class Peaks(Demand):
    """`remaining` (scenarios, jobs) are the tokens that each job will still make. The statistic of
    the scenarios' peaks must fit."""

    remaining: Floats
    statistic: Statistic = mean

    def longest(self, order: Ints, base: int, most: int) -> tuple[int, Need]:
        # Considers only as many requests as could fit without growth, or the one that is admitted
        # regardless, and one more to explain.
        held = np.cumsum(self.held[order])
        most = min(most, max(0, int(np.searchsorted(held, self.limit, side="right")) - base))
        order = order[: base + max(1, most) + 1]
        peaks = PrefixPeaks(base, self.held[order], self.remaining[:, order], self.statistic)
        return peaks.longest(most, self.limit), peaks


def past_future(queue: WorkerQueue, params: Params, rng: np.random.Generator) -> Demand:
    """The future peak M* fits in (1 − `reserved`) · capacity (Past-Future, §3, Algorithm 1;
    `reserved` 0.03 to 0.10).

    Each length is sampled from L | L > generated, `draws` times. One sample of a small batch
    says little; the paper repeats it there without giving a number: 0 samples until jobs ×
    scenarios reach 200, at most 5 times. The paper does not say which of the peaks decides:
    `statistic` is their mean or the largest.
    """
    jobs = queue.jobs
    enough = min(MAX_SCENARIOS, ceil(ENOUGH_DRAWS / max(1, len(jobs))))
    scenarios = int(params["draws"]) or enough
    lengths = queue.forecasts.sample(rng, jobs.forecast, jobs.output, jobs.cap, scenarios)
    remaining = np.maximum(lengths - jobs.output, 0.0)
    limit = (1 - params["reserved"]) * queue.worker.room_tokens
    statistic = list(STATISTICS.values())[int(params["statistic"])]
    return Peaks(needed(queue), limit, remaining, statistic)


PARAMS = {
    "reserved": Param(0.05, 0.0, 1.0),
    "draws": Param(0, 0, 64),
    "statistic": named(*STATISTICS),
}
