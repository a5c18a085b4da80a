"""All orders by name."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from services.forecast import Floats
from services.policies.memory import PolicyMemory
from services.policies.order import (
    alise,
    boost,
    deadlines,
    mlfq,
    rank,
    shortest,
    uniboost,
    waiting,
)
from services.policies.order.ranking import Ranking
from services.policies.order.shortest import gittins_s, mean_s, rank_by_size, tail_s
from services.policies.parameters import Param, Params
from services.policies.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class Order:
    """`rank` with its parameters. `preempts` tells whether a queued request may stand ahead of a
    running one. `batch_key` is a batch's key by its longest wait and its serving time, ascending by
    urgency; None if a batch is as urgent as its most urgent member."""

    rank: Callable[[Snapshot, Params, PolicyMemory], Ranking]
    params: dict[str, Param]
    preempts: bool
    batch_key: Callable[[Floats, Floats], Floats] | None = None


ORDERS = {
    "arrival": Order(waiting.arrival, waiting.PARAMS, preempts=False),
    "fifo": Order(waiting.fifo, waiting.PARAMS, preempts=False),
    "alise": Order(alise.alise, alise.PARAMS, preempts=True),
    "srtf": Order(partial(rank_by_size, mean_s), shortest.PARAMS, preempts=True),
    "gittins": Order(partial(rank_by_size, gittins_s), shortest.PARAMS, preempts=True),
    "tail": Order(partial(rank_by_size, tail_s), shortest.TAIL_PARAMS, preempts=True),
    "rank": Order(rank.rank, rank.PARAMS, preempts=True),
    "mlfq": Order(mlfq.mlfq, mlfq.PARAMS, preempts=True),
    "hrrn": Order(waiting.hrrn, waiting.PARAMS, preempts=False, batch_key=waiting.by_ratio),
    "edf": Order(deadlines.edf, deadlines.PARAMS, preempts=True),
    "boost": Order(boost.boost, boost.PARAMS, preempts=True),
    "uniboost": Order(uniboost.uniboost, uniboost.PARAMS, preempts=True),
    "slack": Order(deadlines.slack, deadlines.PARAMS, preempts=True),
}
