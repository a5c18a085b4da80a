"""When the next round may start."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from services.policies.parameters import Param, Params
from services.policies.snapshot import Contest

LONGEST_S = 600.0  # nobody who comes waits longer than this for a round


@dataclass(frozen=True, slots=True)
class Interval:
    """`ends` says, by the clock of the contest, when the next round may start."""

    ends: Callable[[Contest, Params], float]
    params: dict[str, Param] = field(default_factory=dict)


def events(contest: Contest, params: Params) -> float:
    """As soon as anything happens; what happens at once makes one round."""
    return contest.now


def load(contest: Contest, params: Params) -> float:
    """SCLS: max(λ · the seconds of the least loaded worker, Γ) from now (papers/003 §4.5), and
    `LONGEST_S` at most."""
    jobs, runs = contest.jobs, contest.runs
    loads_s = [
        float(np.sum(jobs.left[runs & (jobs.home == worker.number)])) / worker.full_speed
        for worker in contest.workers
    ]
    wait_s = max(params["interval_share"] * min(loads_s, default=0.0), params["interval_s"])
    return contest.now + min(wait_s, LONGEST_S)


INTERVALS: dict[str, Interval] = {
    "events": Interval(events),
    "load": Interval(
        load,
        {"interval_share": Param(0.5, 0.0, 1.0), "interval_s": Param(3.0, 0.0, LONGEST_S)},
    ),
}
