"""The orders there are, by name."""

from collections.abc import Callable
from dataclasses import dataclass

from services.forecast import Floats
from services.policies.memory import PolicyMemory
from services.policies.order import (
    alise,
    arrival,
    deadlines,
    fifo,
    hrrn,
    mlfq,
    promise,
    rank,
    shortest,
)
from services.policies.order.ranking import Ranking
from services.policies.parameters import Param, Params
from services.policies.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class Order:
    """`rank` with the numbers it takes; `preempts` says whether one who waits may stand ahead of
    one who runs. `batch_key` is a batch's key by the longest wait in it and the time it is served
    in, ascending by urgency; None where a batch is as urgent as its most urgent member."""

    rank: Callable[[Snapshot, Params, PolicyMemory], Ranking]
    params: dict[str, Param]
    preempts: bool
    batch_key: Callable[[Floats, Floats], Floats] | None = None


ORDERS = {
    "arrival": Order(arrival.arrival, arrival.PARAMS, preempts=False),
    "fifo": Order(fifo.fifo, fifo.PARAMS, preempts=False),
    "alise": Order(alise.alise, alise.PARAMS, preempts=True),
    "srtf": Order(shortest.srtf, shortest.PARAMS, preempts=True),
    "gittins": Order(shortest.gittins, shortest.PARAMS, preempts=True),
    "tail": Order(shortest.tail, shortest.TAIL_PARAMS, preempts=True),
    "rank": Order(rank.rank, rank.PARAMS, preempts=True),
    "mlfq": Order(mlfq.mlfq, mlfq.PARAMS, preempts=True),
    "hrrn": Order(hrrn.hrrn, hrrn.PARAMS, preempts=False, batch_key=hrrn.by_ratio),
    "edf": Order(deadlines.edf, deadlines.PARAMS, preempts=True),
    "promise": Order(promise.promise, promise.PARAMS, preempts=True),
    "slack": Order(deadlines.slack, deadlines.PARAMS, preempts=True),
}
