"""Cutting the pool of those who wait into batches that a worker could take whole."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from services.forecast import Ints
from services.policies.parameters import Param, Params
from services.policies.snapshot import Contest, Worker


@dataclass(frozen=True, slots=True)
class Cut:
    cut: Callable[[Contest, Ints, Worker, Params], Iterator[Ints]]
    params: dict[str, Param] = field(default_factory=dict)


def fixed(contest: Contest, rows: Ints, worker: Worker, params: Params) -> Iterator[Ints]:
    """So many each, in order (SLS and VS, papers/003 and 004): the number must be one whose worst
    case fits, so where it does not, a batch ends earlier. `worker` is the one they
    are for. O(rows)."""
    jobs = contest.jobs
    size = max(1, min(int(params["batch_size"]), worker.places))
    worst = worker.whole_blocks(jobs.prompt[rows] + jobs.cap[rows])
    start = 0
    while start < len(rows):
        totals = np.cumsum(worst[start : start + size])
        count = max(1, int(np.searchsorted(totals, worker.kv_tokens, side="right")))
        yield rows[start : start + count]
        start += count


CUTS: dict[str, Cut] = {"fixed": Cut(fixed, {"batch_size": Param(7, 1, 4_096)})}
