"""The memory that workers' queues demand, and the `Form` that computes it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from services.forecast import Floats, Ints
from services.forecasttable import ForecastTable
from services.policies.decision import WaitReason
from services.policies.form.lines import Lines
from services.policies.memory import PolicyMemory
from services.policies.parameters import Param, Params
from services.policies.snapshot import Bools, Columns, Snapshot, WorkerSnapshot, whole_blocks

ANY = 2**31  # slots: as many as the worker has
Need = Callable[[Ints], Floats]
"""Of each queue, given how many of its jobs beyond the kept ones: the KV tokens needed."""


@dataclass(frozen=True, slots=True)
class Demand(ABC):
    """The memory of the jobs of several queues: the tokens that each job holds now, and the tokens
    that each queue may plan in total. At most `slots` jobs of a queue run together, which is one
    number for all queues, or one for each, for the reason `slots_reason`.

    `due` marks running jobs that request more than they were granted and continue only if it fits;
    None: every running job was granted all it may need. A demand must be monotonic: adding a job
    never lowers the need of others.
    """

    held: Floats
    limits: Floats
    slots: Ints | int = field(default=ANY, kw_only=True)
    slots_reason: WaitReason = field(default=WaitReason.SLOTS, kw_only=True)
    due: Bools | None = field(default=None, kw_only=True)

    @abstractmethod
    def count_fitting(self, lines: Lines, base: Ints, most: Ints) -> tuple[Ints, Need]:
        """How many of each line beyond its first `base` fit, at most `most`, and the KV tokens
        needed with each number of them, up to one beyond those that fit."""

    def able(self, kept: Lines, later: Lines) -> Bools:
        """False for those of `later` that would not fit beside the `kept` ones of their queue, each
        alone. True may be optimistic: `count_fitting` decides."""
        room = self.limits - kept.sums(self.held[kept.jobs])
        fits: Bools = self.held[later.jobs] <= room[later.which]
        return fits

    def within(self, slots: Ints) -> tuple[Ints, Ints]:
        """The slots of each queue, given those of its worker, and why no more of its jobs run."""
        reasons = np.where(self.slots < slots, self.slots_reason, WaitReason.SLOTS)
        return np.minimum(slots, self.slots), reasons

    def refusal(self, lines: Lines, front: Ints, need: Floats) -> tuple[Ints, Floats, Floats]:
        """Why the job behind the first `front` of each line does not fit, where all together need
        `need` KV tokens, and the two numbers of the reason."""
        return np.full(len(need), WaitReason.MEMORY), need, self.limits


def count_within(
    lines: Lines, needs: Floats, limits: Floats, base: Ints, most: Ints
) -> tuple[Ints, Need]:
    """`count_fitting`, given what each line needs up to each of its jobs."""
    nth, which = lines.nth, lines.which
    fits = (needs <= limits[which]) & (nth >= base[which]) & (nth < (base + most)[which])
    known = np.append(needs, 0.0)

    def need(count: Ints) -> Floats:
        jobs = base + count
        needed: Floats = known[
            np.where(jobs > 0, np.minimum(lines.starts + jobs, len(needs)), 0) - 1
        ]
        return needed

    return lines.count(fits), need


@dataclass(frozen=True)
class WorkerQueues:
    """The queues of several workers in the same columns: `lines` are all jobs, by queue, in the
    order of each. `limits` are the outputs at which each job stops if it runs next. `numbers` are
    what the policies remember. Jobs that are not `in_reach` count for the forecast of the queue's
    ends, but none of them can run next."""

    jobs: Columns
    is_running: Bools
    limits: Ints
    workers: tuple[WorkerSnapshot, ...]
    lines: Lines
    forecasts: ForecastTable
    numbers: Mapping[str, float]
    in_reach: Bools

    @staticmethod
    def single(
        jobs: Columns,
        is_running: Bools,
        limits: Ints,
        worker: WorkerSnapshot,
        forecasts: ForecastTable,
        numbers: Mapping[str, float],
    ) -> "WorkerQueues":
        """The queue of one worker, with all of its jobs in reach."""
        lines, all_ = Lines.consecutive(np.array([len(jobs)])), np.ones(len(jobs), bool)
        tables = forecasts, numbers
        return WorkerQueues(jobs, is_running, limits, (worker,), lines, *tables, all_)

    @cached_property
    def rooms(self) -> Floats:
        """KV tokens of each worker."""
        return np.array([worker.room_tokens for worker in self.workers], float)

    @property
    def block_tokens(self) -> Ints | int:
        """Of each job's worker; one number if all are equal, by which numpy divides faster."""
        blocks = [worker.block_tokens for worker in self.workers]
        return blocks[0] if len(set(blocks)) == 1 else np.array(blocks)[self.lines.which]


@dataclass(frozen=True, slots=True)
class Form:
    """`demand` is the memory that queues demand. `reflect`, for a form that learns from its
    outcomes, updates the memory's numbers before each round. `renews`: running jobs may have to
    find memory again although none waits, so that some may be paused without a replacement.
    `reserves`: it reserves the most that a request may take."""

    demand: Callable[[WorkerQueues, Params, np.random.Generator], Demand]
    params: dict[str, Param] = field(default_factory=dict)
    reflect: Callable[[Snapshot, Params, PolicyMemory], PolicyMemory] | None = None
    renews: bool = False
    reserves: bool = False


def needed_tokens(queues: WorkerQueues) -> Floats:
    """Tokens that each job holds, or must hold to continue, in whole blocks."""
    jobs, block_tokens = queues.jobs, queues.block_tokens
    held: Ints = np.maximum(whole_blocks(jobs.context, block_tokens), jobs.blocks * block_tokens)
    return held.astype(float)
