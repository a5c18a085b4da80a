"""Cuts the pool of queued requests into batches that a worker could serve whole."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from services.forecast import Ints
from services.policies.form import dp, wma
from services.policies.form.pool import Batches, Room, Sizes
from services.policies.parameters import Param, Params
from services.policies.snapshot import WorkerSnapshot

MAX_BATCH_SIZE = 4_096


@dataclass(frozen=True, slots=True)
class BatchCut:
    """`cut` returns a batch label for each position (in order of urgency): `known` batches have the
    first labels, new batches follow.

    `uses_forecast`: memory is planned for the expected output, not for the most a slice allows.
    `inserts`: batches stay open until a worker takes them. A request joins one on arrival, and a
    batch that runs out of memory is halved and closed. `in_order`: the first batches do not depend
    on the requests behind them. `reserves`: a batch reserves the most that its requests may take.
    """

    cut: Callable[[Sizes, Ints, Batches, Room, Params], Ints]
    params: dict[str, Param] = field(default_factory=dict)
    uses_forecast: bool = False
    inserts: bool = False
    in_order: bool = False
    reserves: bool = False

    def room(self, worker: WorkerSnapshot, params: Params) -> Room:
        """The capacity of one batch: a share of the worker's KV."""
        return Room.for_worker(worker, params.get("zeta", 1.0), int(params["batch_size"]))


def fixed(sizes: Sizes, at: Ints, known: Batches, room: Room, params: Params) -> Ints:
    """Batches of `batch_size`, first come, first served (SLS in SCLS, §2.4; VS in Magnus, §II-E).
    The worst case of this size must fit (Magnus, Eq. 1); otherwise a batch ends early.
    O(rows)."""
    labels = np.zeros(len(at), np.int64)
    start = label = 0
    while start < len(at):
        window = at[start : start + max(1, room.slots)]
        length = np.maximum.accumulate(sizes.length[window])
        max_output = np.maximum.accumulate(sizes.max_output[window])
        fits = room.fits_each(np.arange(1, len(window) + 1), length, max_output)
        count = max(1, len(window) if fits.all() else int(np.argmin(fits)))
        labels[start : start + count] = label
        start, label = start + count, label + 1
    return labels


CUTS: dict[str, BatchCut] = {
    "fixed": BatchCut(
        fixed, {"batch_size": Param(7, 1, MAX_BATCH_SIZE)}, in_order=True, reserves=True
    ),
    "dp": BatchCut(
        dp.dp,
        {"batch_size": Param(MAX_BATCH_SIZE, 1, MAX_BATCH_SIZE), "zeta": Param(0.9, 0.01, 1.0)},
        reserves=True,
    ),
    "wma": BatchCut(
        wma.insert,
        {
            "batch_size": Param(MAX_BATCH_SIZE, 1, MAX_BATCH_SIZE),
            "zeta": Param(0.7, 0.01, 1.0),
            "wma_max": Param(50_000, 0, 2**53),
        },
        uses_forecast=True,
        inserts=True,
    ),
}
