"""Which worker a batch waits for, where it is bound to one: the places of the batch arrangement."""

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
    """`assign`: batches wait for a worker each; None: whoever has nothing to do takes the next."""

    assign: Assign | None = None
    params: dict[str, Param] = field(default_factory=dict)
    cached: bool = False


def round_robin(loads_s: Floats, serve_s: Floats, able: Bools, last: int) -> Ints:
    """In turns, of those that could take it, whatever they have to do. O(batches · workers)."""
    count = len(loads_s)
    seats = np.full(able.shape[1], UNASSIGNED, np.int64)
    for batch in range(able.shape[1]):
        turns = ((last + 1 + step) % count for step in range(count))
        seat = next((seat for seat in turns if able[seat, batch]), UNASSIGNED)
        if seat != UNASSIGNED:
            seats[batch] = last = seat
    return seats


def max_min(loads_s: Floats, serve_s: Floats, able: Bools, last: int) -> Ints:
    """The longest first, to the least loaded of those that could take it, whose load it then is
    (papers/003 §4.5, Eq. 11). How long it is, is what the first of them takes for it.
    O(batches · workers)."""
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
