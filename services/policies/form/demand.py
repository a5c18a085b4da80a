"""What running together asks of memory, by each forming policy: needs of a line, and a limit."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import ceil

import numpy as np

from services.forecast import Floats, ForecastTable, Ints
from services.policies.form.peak import PrefixPeaks
from services.policies.memory import Memory
from services.policies.parameters import Param, Params
from services.policies.snapshot import Bools, Jobs, Snapshot, Worker

ENOUGH_DRAWS = 200  # lengths of running requests drawn in all before one more scenario adds little
MOST_SCENARIOS = 5


@dataclass(frozen=True, slots=True)
class Demand:
    """Of the jobs of a line, parallel to it: the tokens each holds, where `remaining` (scenarios,
    jobs) is given those it will still make, and how many tokens may be planned in all."""

    held: Floats
    limit: float
    remaining: Floats | None = None

    def longest(self, order: Ints, base: int, most: int) -> tuple[int, Callable[[int], float]]:
        """How many of `order` beyond its first `base` fit, `most` at most; and the tokens that
        the first so many beyond them need."""
        held = self.held[order]
        if self.remaining is None:
            totals = np.cumsum(held)
            needs = np.concatenate([[totals[base - 1] if base else 0.0], totals[base:]])
            fit = int(np.searchsorted(needs, self.limit, side="right")) - 1
            return min(most, max(0, fit)), lambda count: float(needs[count])
        # No more are looked at than could fit if they never grew, or than the one that comes in
        # whatever it needs, and one that says why it waits.
        reach = int(np.searchsorted(np.cumsum(held), self.limit, side="right")) - base
        most = min(most, max(0, reach))
        order = order[: base + max(1, most) + 1]
        peaks = PrefixPeaks(base, self.held[order], self.remaining[:, order])
        return peaks.longest(most, self.limit), peaks


@dataclass(frozen=True, slots=True)
class Line:
    """One worker's line, as a form sees it: its jobs in order, those that run marked. `numbers`
    are what the policies remember of the whole."""

    jobs: Jobs
    runs: Bools
    worker: Worker
    forecasts: ForecastTable
    numbers: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Form:
    """What a line asks of memory. `reflect`, where a form learns from what came of its decisions,
    brings the memory's numbers up to date before each round."""

    demand: Callable[[Line, Params, np.random.Generator], Demand]
    params: dict[str, Param] = field(default_factory=dict)
    reflect: Callable[[Snapshot, Params, Memory], Memory] | None = None


def needed(line: Line) -> Floats:
    """What each holds, or must hold to go on, in whole blocks."""
    jobs, worker = line.jobs, line.worker
    held = np.maximum(worker.whole_blocks(jobs.context), jobs.blocks * worker.block_tokens)
    return held.astype(float)


def aggressive(line: Line, params: Params, rng: np.random.Generator) -> Demand:
    """What is held now fits under `watermark` · capacity; outputs are not foreseen at all
    (vLLM's way; papers/000 §2, which tries 0.90 to 0.99)."""
    return Demand(needed(line), params["watermark"] * line.worker.room_tokens)


def conservative(line: Line, params: Params, rng: np.random.Generator) -> Demand:
    """The worst case fits in `overcommit` · capacity: Σ (prompt + max_tokens) (TGI's and
    FastGen's way; papers/000 §2). At 1 nobody is ever evicted; the paper also tries 1.25, 1.5."""
    worst = line.worker.whole_blocks(line.jobs.prompt + line.jobs.cap).astype(float)
    return Demand(worst, params["overcommit"] * line.worker.room_tokens)


def past_future(line: Line, params: Params, rng: np.random.Generator) -> Demand:
    """The future peak M* fits in (1 − `reserved`) · capacity: Past-Future's Algorithm 1
    (papers/000 §3; `reserved` 0.03 to 0.10).

    Everyone gets a length drawn anew from L | L > generated. One draw of a small batch says
    little, so it is drawn several times (until jobs × scenarios reach 200, at most 5 scenarios)
    and the mean of the peaks decides.
    """
    jobs = line.jobs
    scenarios = min(MOST_SCENARIOS, ceil(ENOUGH_DRAWS / max(1, len(jobs))))
    lengths = line.forecasts.sample(rng, jobs.forecast, jobs.output, jobs.cap, scenarios)
    remaining = np.maximum(lengths - jobs.output, 0.0)
    limit = (1 - params["reserved"]) * line.worker.room_tokens
    return Demand(needed(line), limit, remaining)


FORMS: dict[str, Form] = {
    "aggressive": Form(aggressive, {"watermark": Param(0.95, 0.0, 1.0)}),
    "conservative": Form(conservative, {"overcommit": Param(1.0, 0.0, 10.0)}),
    "past_future": Form(past_future, {"reserved": Param(0.05, 0.0, 1.0)}),
}
