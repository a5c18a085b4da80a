"""When the next round may start."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from services.forecast import Floats
from services.policies.parameters import Param, Params
from services.policies.snapshot import Candidates

MAX_INTERVAL_S = 600.0  # nobody who comes waits longer than this for a round


@dataclass(frozen=True, slots=True)
class Interval:
    """`wait_s` says, of the seconds each worker has still to do, after how many the next round may
    start; where batches are formed, the next forming. `ahead`: batches are formed then, before
    there are workers for them, and else as soon as a worker has nothing to do."""

    wait_s: Callable[[Floats, Params], float]
    params: dict[str, Param] = field(default_factory=dict)
    ahead: bool = False

    def ends(self, contest: Candidates, params: Params) -> float:
        """By the clock of the contest, when the next round may start."""
        return contest.now + self.wait_s(running_s(contest), params)


def running_s(contest: Candidates) -> Floats:
    """Seconds of what runs at each worker: the tokens still to come, at its full speed."""
    jobs, runs = contest.jobs, contest.is_running
    return np.array(
        [
            float(np.sum(jobs.expected_remaining[runs & (jobs.home == worker.number)]))
            / worker.full_speed
            for worker in contest.workers
        ]
    )


def events(loads_s: Floats, params: Params) -> float:
    """As soon as anything happens; what happens at once makes one round."""
    return 0.0


def load(loads_s: Floats, params: Params) -> float:
    """SCLS: max(λ · the seconds of the least loaded worker, Γ) (papers/003 Eq. 12), and
    `LONGEST_S` at most."""
    least_s = float(loads_s.min()) if len(loads_s) else 0.0
    wait_s = max(params["interval_share"] * least_s, params["interval_s"])
    return min(wait_s, MAX_INTERVAL_S)


INTERVALS: dict[str, Interval] = {
    "events": Interval(events),
    "load": Interval(
        load,
        {"interval_share": Param(0.5, 0.0, 1.0), "interval_s": Param(3.0, 0.0, MAX_INTERVAL_S)},
        ahead=True,
    ),
}
