"""The orders there are, by name."""

from collections.abc import Callable
from dataclasses import dataclass

from services.policies.memory import Memory
from services.policies.order import alise, arrival
from services.policies.order.ranking import Ranking
from services.policies.parameters import Param, Params
from services.policies.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class Order:
    """`rank` with the numbers it takes; `preempts` says whether one who waits may stand ahead of
    one who runs."""

    rank: Callable[[Snapshot, Params, Memory], Ranking]
    params: dict[str, Param]
    preempts: bool


ORDERS = {
    "arrival": Order(arrival.arrival, arrival.PARAMS, preempts=False),
    "alise": Order(alise.alise, alise.PARAMS, preempts=True),
}
