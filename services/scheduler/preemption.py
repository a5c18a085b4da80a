"""Which running jobs make way for queued ones."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from services.forecast import Floats, Ints
from services.scheduler.alise import FRONT
from services.scheduler.jobs import Job
from services.scheduler.parameters import Param

Preemption = Callable[[Sequence[Job], Sequence[Job], Mapping[str, float]], Ints]


def never(queued: Sequence[Job], running: Sequence[Job], params: Mapping[str, float]) -> Ints:
    """Who runs stays."""
    return np.zeros(len(running), np.int64)


def priority(queued: Sequence[Job], running: Sequence[Job], params: Mapping[str, float]) -> Ints:
    """How many of the queued, from its head, each running job makes way for.

    One makes way for another of a better level that needs less time by a share of `hysteresis`,
    so that near-equal ones do not trade places: who took a place by this only comes to need
    less. And for whoever has aged to the FRONT, unless it is there itself; so of two jobs the
    same one makes way at most once, but for mispredictions, and those double what is promised.
    Who has nothing in KV yet stays: it has only just come. O(queued · running), vectorised.
    """
    levels, needs = _columns(queued)
    run_levels, run_needs = _columns(running)
    shorter = needs[:, None] * (1 + params["hysteresis"]) < run_needs
    ahead = (levels[:, None] < run_levels) & (shorter | (levels[:, None] == FRONT))
    begun = np.array([job.held_tokens > 0 for job in running], bool)
    stops = np.vstack([~(ahead & begun), np.ones((1, len(running)), bool)])
    makes_way: Ints = np.argmax(stops, axis=0)
    return makes_way


def _columns(jobs: Sequence[Job]) -> tuple[Ints, Floats]:
    levels = np.array([job.rank.level for job in jobs], np.int64)
    return levels, np.array([job.rank.remaining_s for job in jobs], float)


PREEMPTIONS: dict[str, Preemption] = {"never": never, "priority": priority}
PARAMS: dict[str, dict[str, Param]] = {
    "never": {},
    "priority": {"hysteresis": Param(0.25, 0.0, 100.0)},
}
