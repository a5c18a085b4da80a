"""Which worker a formed batch waits for, in placements that bind batches to workers."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from services.forecast import Floats, Ints
from services.policies.parameters import Param
from services.policies.snapshot import Bools

UNASSIGNED = -1

Assign = Callable[[Floats, Floats, Bools, int], Ints]
"""(loads_s of the workers, seconds and ability of (workers, batches), the worker after which it is
the next one's turn) → the worker of each batch, by its place among them, or UNASSIGNED."""


@dataclass(frozen=True, slots=True)
class BatchPlacement:
    """`assign` binds each batch to a worker; None: any idle worker takes the next batch."""

    assign: Assign | None = None
    params: dict[str, Param] = field(default_factory=dict)
    cached: bool = False


def round_robin(loads_s: Floats, serve_s: Floats, able: Bools, last: int) -> Ints:
    """In turns among the workers that can serve it, whatever their load. O(batches · workers)."""
    count = len(loads_s)
    seats = np.full(able.shape[1], UNASSIGNED, np.int64)
    for batch in range(able.shape[1]):
        turns = ((last + 1 + step) % count for step in range(count))
        seat = next((seat for seat in turns if able[seat, batch]), UNASSIGNED)
        if seat != UNASSIGNED:
            seats[batch] = last = seat
    return seats


def max_min(loads_s: Floats, serve_s: Floats, able: Bools, last: int) -> Ints:
    """The longest first, to the least loaded worker that can serve it, which then has its load
    (SCLS, §4.5, Eq. 11). Its length is its time on the first of them. O(batches · workers)."""
    loads = loads_s.tolist()
    seats = np.full(able.shape[1], UNASSIGNED, np.int64)
    longest = serve_s[able.argmax(axis=0), np.arange(able.shape[1])]
    for batch in np.argsort(-longest, kind="stable").tolist():
        could = np.flatnonzero(able[:, batch]).tolist()
        if could:
            seat = min(could, key=loads.__getitem__)
            loads[seat] += float(serve_s[seat, batch])
            seats[batch] = seat
    return seats


BATCH_PLACEMENTS: dict[str, BatchPlacement] = {
    "least_load": BatchPlacement(),
    "round_robin": BatchPlacement(round_robin),
    "max_min": BatchPlacement(max_min),
}
