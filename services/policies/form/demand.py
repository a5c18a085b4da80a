"""The memory that a worker's queue demands, and the `Form` that computes it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from services.forecast import Floats, Ints
from services.forecasttable import ForecastTable
from services.policies.decision import WaitReason
from services.policies.memory import PolicyMemory
from services.policies.parameters import Param, Params
from services.policies.snapshot import (
    Bools,
    Columns,
    SelectedColumns,
    Snapshot,
    WorkerSnapshot,
    whole_blocks,
)

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

    @property
    def block_tokens(self) -> int:
        return self.worker.block_tokens


@dataclass(frozen=True)
class WorkerQueues:
    """The queues of several workers as parts of the same columns: the first `sizes[0]` jobs are the
    queue of the first worker, and so on. None is empty unless it is the only one. Jobs that are
    not `in_reach` count for the forecast of the queue's ends, but none of them can run next."""

    jobs: SelectedColumns
    is_running: Bools
    limits: Ints
    workers: tuple[WorkerSnapshot, ...]
    sizes: Ints
    forecasts: ForecastTable
    numbers: Mapping[str, float]
    in_reach: Bools

    @cached_property
    def starts(self) -> Ints:
        """Where each queue begins."""
        starts: Ints = self.sizes.cumsum() - self.sizes
        return starts

    @cached_property
    def which(self) -> Ints:
        """The index of each job's queue."""
        return np.arange(len(self.sizes)).repeat(self.sizes)

    @property
    def block_tokens(self) -> Ints | int:
        """Of each job's worker; one number if all are equal, by which numpy divides faster."""
        blocks = [worker.block_tokens for worker in self.workers]
        return blocks[0] if len(set(blocks)) == 1 else np.array(blocks)[self.which]

    def __iter__(self) -> Iterator[WorkerQueue]:
        first = 0
        for worker, last in zip(self.workers, self.sizes.cumsum().tolist(), strict=True):
            part = slice(first, last)
            jobs = self.jobs.select(np.arange(first, last))
            runs, limits = self.is_running[part], self.limits[part]
            yield WorkerQueue(jobs, runs, limits, worker, self.forecasts, self.numbers)
            first = last


Demands = Callable[[WorkerQueues, Params, np.random.Generator], list[Demand]]


def for_each_queue(
    demand: Callable[[WorkerQueue, Params, np.random.Generator], Demand],
) -> Demands:
    """The demands of several queues, each computed alone."""
    return lambda queues, params, rng: [demand(queue, params, rng) for queue in queues]


@dataclass(frozen=True, slots=True)
class Form:
    """The memory that queues demand. `reflect`, for a form that learns from its outcomes, updates
    the memory's numbers before each round. `renews`: running jobs may have to find memory again
    although none waits, so that some may be paused without a replacement. `reserves`: it reserves
    the most that a request may take."""

    demands: Demands
    params: dict[str, Param] = field(default_factory=dict)
    reflect: Callable[[Snapshot, Params, PolicyMemory], PolicyMemory] | None = None
    renews: bool = False
    reserves: bool = False

    def demand(self, queue: WorkerQueue, params: Params, rng: np.random.Generator) -> Demand:
        """The demand of one queue."""
        sizes, jobs = np.array([len(queue.jobs)]), queue.jobs.select(np.arange(len(queue.jobs)))
        workers, tables = (queue.worker,), (queue.forecasts, queue.numbers)
        all_ = np.ones(len(jobs), bool)
        queues = WorkerQueues(jobs, queue.is_running, queue.limits, workers, sizes, *tables, all_)
        return self.demands(queues, params, rng)[0]


def needed_tokens(queue: WorkerQueue | WorkerQueues) -> Floats:
    """Tokens that each job holds, or must hold to continue, in whole blocks."""
    jobs, block_tokens = queue.jobs, queue.block_tokens
    held: Ints = np.maximum(whole_blocks(jobs.context, block_tokens), jobs.blocks * block_tokens)
    return held.astype(float)
