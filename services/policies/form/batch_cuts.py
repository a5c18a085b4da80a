"""Cutting the pool of those who wait into batches that a worker could take whole."""

from collections.abc import Callable
from dataclasses import dataclass, field

from services.forecast import Ints
from services.policies.form import dp, fixed, wma
from services.policies.form.pool import Batches, Room, Sizes
from services.policies.parameters import Param, Params
from services.policies.snapshot import WorkerSnapshot

MOST = 4_096


@dataclass(frozen=True, slots=True)
class Cut:
    """`cut` says of positions in the contest, in order of urgency, which batch each is in: those
    already `known` are numbered from 0, new ones from there on.

    `foresees`: memory is planned for what is expected to be made, not for the most there may be.
    `inserts`: batches stay open until a worker takes them; whoever comes is put into one at once,
    and one that was too large for its worker's memory is halved and closed. `in_order`: who is in
    the first batches does not depend on who comes after them.
    """

    cut: Callable[[Sizes, Ints, Batches, Room, Params], Ints]
    params: dict[str, Param] = field(default_factory=dict)
    foresees: bool = False
    inserts: bool = False
    in_order: bool = False

    def room(self, worker: WorkerSnapshot, params: Params) -> Room:
        """What one batch may take of it."""
        return Room.of(worker, params.get("zeta", 1.0), int(params["batch_size"]))


CUTS: dict[str, Cut] = {
    "fixed": Cut(fixed.fixed, {"batch_size": Param(7, 1, MOST)}, in_order=True),
    "dp": Cut(dp.dp, {"batch_size": Param(MOST, 1, MOST), "zeta": Param(0.9, 0.01, 1.0)}),
    "wma": Cut(
        wma.insert,
        {
            "batch_size": Param(MOST, 1, MOST),
            "zeta": Param(0.7, 0.01, 1.0),
            "wma_max": Param(50_000, 0, 2**53),
        },
        foresees=True,
        inserts=True,
    ),
}
