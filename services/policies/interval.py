"""When the next round may start."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from services.forecast import Floats
from services.policies.parameters import Param, Params
from services.policies.snapshot import Candidates

MAX_INTERVAL_S = 600.0  # the longest wait for a round


@dataclass(frozen=True, slots=True)
class Interval:
    """`wait_s` computes, from each worker's remaining seconds, when the next round may start, or
    the next forming where batches are formed; without it an event starts a round at once.
    `ahead`: batches form at that time, before workers are free; otherwise as soon as a worker is
    idle."""

    wait_s: Callable[[Floats, Params], float] | None = None
    params: dict[str, Param] = field(default_factory=dict)
    ahead: bool = False

    def ends(self, candidates: Candidates, params: Params) -> float:
        """When the next round may start, on the snapshot's clock."""
        if self.wait_s is None:
            return candidates.now
        return self.after(candidates.now, running_s(candidates), params)

    def after(self, now: float, loads_s: Floats, params: Params) -> float:
        """When the next forming may start, given each worker's remaining seconds."""
        return now + self.wait_s(loads_s, params) if self.wait_s else now


def running_s(candidates: Candidates) -> Floats:
    """Seconds of the running requests at each worker: the remaining tokens at full speed."""
    jobs, runs = candidates.jobs, candidates.is_running
    return np.array(
        [
            float(np.sum(jobs.expected_remaining[runs & (jobs.home == worker.number)]))
            / worker.full_speed
            for worker in candidates.workers
        ]
    )


def load(loads_s: Floats, params: Params) -> float:
    """SCLS: max(λ · seconds of the least loaded worker, Γ) (Eq. 12), and at most MAX_INTERVAL_S."""
    least_s = float(loads_s.min()) if len(loads_s) else 0.0
    wait_s = max(params["interval_share"] * least_s, params["interval_s"])
    return min(wait_s, MAX_INTERVAL_S)


INTERVALS: dict[str, Interval] = {
    "events": Interval(),
    "load": Interval(
        load,
        {"interval_share": Param(0.5, 0.0, 1.0), "interval_s": Param(3.0, 0.0, MAX_INTERVAL_S)},
        ahead=True,
    ),
}
