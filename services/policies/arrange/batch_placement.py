"""Which worker a formed batch waits for, in placements that bind batches to workers."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from services.forecast import Floats, Ints
from services.policies.parameters import Param
from services.policies.snapshot import Bools

UNASSIGNED = -1

Assign = Callable[[Floats, Floats, Bools, int], Ints]
"""(load of each worker in seconds, (workers, batches) serving times in seconds, (workers, batches)
whether the worker can serve the batch, index of the worker that took the last turn) → the index of
each batch's worker, or UNASSIGNED."""


@dataclass(frozen=True, slots=True)
class BatchPlacement:
    """`assign` binds each batch to a worker; None: any idle worker takes the next batch."""

    assign: Assign | None = None
    params: dict[str, Param] = field(default_factory=dict)
    cached: bool = False


def round_robin(loads_s: Floats, serve_s: Floats, able: Bools, last: int) -> Ints:
    """In turns among the workers that can serve it, whatever their load. O(batches), and
    O(workers) for each that not every worker can serve."""
    count, batches = able.shape
    chosen = np.full(batches, UNASSIGNED, np.int64)
    first = 0
    for some in [*np.flatnonzero(~able.all(axis=0)).tolist(), batches]:
        chosen[first:some] = (last + 1 + np.arange(some - first)) % count  # every worker can
        last = (last + some - first) % count
        turns = ((last + 1 + step) % count for step in range(count if some < batches else 0))
        index = next((index for index in turns if able[index, some]), UNASSIGNED)
        if index != UNASSIGNED:
            chosen[some] = last = index
        first = some + 1
    return chosen


def max_min(loads_s: Floats, serve_s: Floats, able: Bools, last: int) -> Ints:
    """The longest first, to the least loaded worker that can serve it, which then has its load
    (SCLS, §4.5, Eq. 11). Its length is its time on the first of them. O(batches · workers)."""
    loads = loads_s.tolist()
    chosen = np.full(able.shape[1], UNASSIGNED, np.int64)
    longest = serve_s[able.argmax(axis=0), np.arange(able.shape[1])]
    for batch in np.argsort(-longest, kind="stable").tolist():
        could = np.flatnonzero(able[:, batch]).tolist()
        if could:
            index = min(could, key=loads.__getitem__)
            loads[index] += float(serve_s[index, batch])
            chosen[batch] = index
    return chosen


BATCH_PLACEMENTS: dict[str, BatchPlacement] = {
    "least_load": BatchPlacement(),
    "round_robin": BatchPlacement(round_robin),
    "max_min": BatchPlacement(max_min),
}
