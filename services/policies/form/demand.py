"""What running together asks of a worker: how many of a queue fit, and what a form is."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from services.forecast import Floats, Ints
from services.forecasttable import ForecastTable
from services.policies.decision import WaitReason
from services.policies.memory import PolicyMemory
from services.policies.parameters import Param, Params
from services.policies.snapshot import Bools, RequestColumns, Snapshot, WorkerSnapshot

ANY = 2**31  # places: as many as the worker has
Need = Callable[[int], float]


@dataclass(frozen=True, slots=True)
class Demand(ABC):
    """Of the jobs of a queue, parallel to it: the tokens each holds by now, and how many tokens may
    be planned in all. No more than `places` run together. `due`: who of those that run comes to
    ask for more than it was granted, and goes on only if that fits; None: nobody, who runs
    was granted all it may need.

    A demand must rise: whoever is added, those who run need no less.
    """

    held: Floats
    limit: float
    places: int = field(default=ANY, kw_only=True)
    due: Bools | None = field(default=None, kw_only=True)

    @abstractmethod
    def longest(self, order: Ints, base: int, most: int) -> tuple[int, Need]:
        """How many of `order` beyond its first `base` fit, `most` at most; and the tokens of KV
        that the first so many beyond them need, as far as one beyond those who fit."""

    def able(self, kept: Ints, later: Ints) -> Bools:
        """False for those of `later` that would not fit, one alone, beside `kept`. True may be
        too hopeful: `longest` decides."""
        fits: Bools = self.held[later] <= self.limit - float(np.sum(self.held[kept]))
        return fits

    def refusal(self, order: Ints, need: float) -> tuple[WaitReason, float, float]:
        """Why the last of `order` does not fit behind those before it, who need `need` tokens of
        KV with it; and the reason's two numbers."""
        return WaitReason.MEMORY, need, self.limit


@dataclass(frozen=True, slots=True)
class WorkerQueue:
    """One worker's queue, as a form sees it: its jobs in order, those that run marked. `limits` are
    the output that each may have made before it stops by itself, if it runs next; `numbers` what
    the policies remember of the whole."""

    jobs: RequestColumns
    runs: Bools
    limits: Ints
    worker: WorkerSnapshot
    forecasts: ForecastTable
    numbers: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Form:
    """What a queue asks of memory. `reflect`, where a form learns from what came of its decisions,
    brings the memory's numbers up to date before each round. `renews`: who runs may have to
    find room anew though nobody waits, so that some may be paused with nobody in their place."""

    demand: Callable[[WorkerQueue, Params, np.random.Generator], Demand]
    params: dict[str, Param] = field(default_factory=dict)
    reflect: Callable[[Snapshot, Params, PolicyMemory], PolicyMemory] | None = None
    renews: bool = False


def needed(queue: WorkerQueue) -> Floats:
    """What each holds, or must hold to go on, in whole blocks."""
    jobs, worker = queue.jobs, queue.worker
    held = np.maximum(worker.whole_blocks(jobs.context), jobs.blocks * worker.block_tokens)
    return held.astype(float)
