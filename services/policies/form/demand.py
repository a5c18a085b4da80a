"""The memory that a worker's queue demands, and the `Form` that computes it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from services.forecast import Floats, Ints
from services.forecasttable import ForecastTable
from services.policies.decision import WaitReason
from services.policies.memory import PolicyMemory
from services.policies.parameters import Param, Params
from services.policies.snapshot import Bools, Columns, Snapshot, WorkerSnapshot

ANY = 2**31  # slots: as many as the worker has
Need = Callable[[int], float]


@dataclass(frozen=True, slots=True)
class Demand(ABC):
    """The memory of a queue's jobs, parallel to it: tokens held now, and the tokens that may be
    planned in total. At most `slots` jobs run together.

    `due` marks running jobs that request more than they were granted and continue only if it fits;
    None: every running job was granted all it may need. A demand must be monotonic: adding a job
    never lowers the need of others.
    """

    held: Floats
    limit: float
    slots: int = field(default=ANY, kw_only=True)
    due: Bools | None = field(default=None, kw_only=True)

    @abstractmethod
    def count_fitting(self, order: Ints, base: int, most: int) -> tuple[int, Need]:
        """How many of `order` beyond its first `base` fit, at most `most`, and the KV tokens needed
        with each number of them, up to one beyond those that fit."""

    def able(self, kept: Ints, later: Ints) -> Bools:
        """False for those of `later` that would not fit beside `kept`, each alone. True may be
        optimistic: `count_fitting` decides."""
        fits: Bools = self.held[later] <= self.limit - float(np.sum(self.held[kept]))
        return fits

    def refusal(self, order: Ints, need: float) -> tuple[WaitReason, float, float]:
        """Why the last of `order` does not fit behind the others, where all together need `need` KV
        tokens, and the two numbers of the reason."""
        return WaitReason.MEMORY, need, self.limit


@dataclass(frozen=True, slots=True)
class WorkerQueue:
    """One worker's queue: its jobs in order, with running ones marked. `limits` are the outputs at
    which each stops if it runs next. `numbers` are what the policies remember."""

    jobs: Columns
    is_running: Bools
    limits: Ints
    worker: WorkerSnapshot
    forecasts: ForecastTable
    numbers: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Form:
    """The memory that a queue demands. `reflect`, for a form that learns from its outcomes, updates
    the memory's numbers before each round. `renews`: running jobs may have to find memory again
    although none waits, so that some may be paused without a replacement. `reserves`: it reserves
    the most that a request may take."""

    demand: Callable[[WorkerQueue, Params, np.random.Generator], Demand]
    params: dict[str, Param] = field(default_factory=dict)
    reflect: Callable[[Snapshot, Params, PolicyMemory], PolicyMemory] | None = None
    renews: bool = False
    reserves: bool = False


def needed_tokens(queue: WorkerQueue) -> Floats:
    """Tokens that each job holds, or must hold to continue, in whole blocks."""
    jobs, worker = queue.jobs, queue.worker
    held = np.maximum(worker.whole_blocks(jobs.context), jobs.blocks * worker.block_tokens)
    return held.astype(float)
