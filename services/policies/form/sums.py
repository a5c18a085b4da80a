"""Forms that add up: each job counts with a fixed number of tokens, and the sum must fit in the
memory, or in the memory and in the token budget of a step."""

from dataclasses import dataclass

import numpy as np

from services.forecast import Floats, Ints
from services.policies.decision import WaitReason
from services.policies.form.demand import (
    Demand,
    Need,
    WorkerQueues,
    count_within,
    needed_tokens,
)
from services.policies.form.lines import Lines
from services.policies.parameters import Param, Params
from services.policies.snapshot import Bools, whole_blocks


@dataclass(frozen=True, slots=True)
class SumDemand(Demand):
    """A job never needs more than it counts for. O(jobs)."""

    def count_fitting(self, lines: Lines, base: Ints, most: Ints) -> tuple[Ints, Need]:
        needs = lines.running_sums(self.held[lines.jobs])
        return count_within(lines, needs, self.limits, base, most)


@dataclass(frozen=True, slots=True)
class StepBudgetDemand(Demand):
    """In addition to memory: `cost`, the tokens that each request adds to the next steps, and the
    `budget` of one step.

    An admitted request finds room for at least one token: the last prompt is split into chunks of
    what is left, so that a prompt longer than the budget need not wait for an idle worker. O(jobs).
    """

    cost: Floats
    budget: float

    def count_fitting(self, lines: Lines, base: Ints, most: Ints) -> tuple[Ints, Need]:
        fits, need = SumDemand(self.held, self.limits).count_fitting(lines, base, most)
        cost = self.cost[lines.jobs]
        ahead = lines.running_sums(cost) - cost
        within = lines.count((ahead < self.budget) & (lines.nth >= base[lines.which]))
        return np.minimum(fits, within), need

    def able(self, kept: Lines, later: Lines) -> Bools:
        starts = kept.sums(self.cost[kept.jobs]) < self.budget
        return Demand.able(self, kept, later) & starts[later.which]

    def refusal(self, lines: Lines, front: Ints, need: Floats) -> tuple[Ints, Floats, Floats]:
        short, upto = need > self.limits, lines.upto(front + 1)
        return (
            np.where(short, WaitReason.MEMORY, WaitReason.STEP_BUDGET),
            np.where(short, need, upto.sums(self.cost[upto.jobs])),
            np.where(short, self.limits, self.budget),
        )


def aggressive(queues: WorkerQueues, params: Params, rng: np.random.Generator) -> Demand:
    """The memory held now fits under `watermark` · capacity; outputs are not forecast (vLLM's way;
    Past-Future, §2, which evaluates 0.90 to 0.99)."""
    return SumDemand(needed_tokens(queues), params["watermark"] * queues.rooms)


def conservative(queues: WorkerQueues, params: Params, rng: np.random.Generator) -> Demand:
    """The worst case fits in `overcommit` · capacity: Σ (prompt + max_tokens) (TGI's and
    FastGen's way; Past-Future, §2). At 1 no request is ever evicted; the paper also evaluates
    1.25 and 1.5."""
    return SumDemand(_worst(queues), params["overcommit"] * queues.rooms)


def fixed(queues: WorkerQueues, params: Params, rng: np.random.Generator) -> Demand:
    """At most `batch_size` requests run together, and their worst case fits: none is ever evicted
    (ORCA's maximum batch size with memory reserved for max_tokens; Magnus' baseline CCB with 7,
    §IV-A)."""
    return SumDemand(_worst(queues), queues.rooms, slots=int(params["batch_size"]))


def sliced(queues: WorkerQueues, params: Params, rng: np.random.Generator) -> Demand:
    """The largest need of a slice fits in `zeta` · capacity: Σ (context + slice) (SCLS, Eq. 7–9,
    without the padding of its static batches).

    A request within its slice counts up to the slice's end. At the next slice it must find memory
    again, so that none is evicted within a slice. (Under `defer` paused requests keep their memory,
    so that this holds only for newly admitted ones.)
    """
    jobs = queues.jobs
    ends = jobs.prompt + np.maximum(queues.limits, jobs.output)
    reach = whole_blocks(ends, queues.block_tokens).astype(float)
    due = queues.is_running & (queues.limits > jobs.limit)
    needed = np.maximum(reach, needed_tokens(queues))
    return SumDemand(needed, params["zeta"] * queues.rooms, due=due)


def token_budget(queues: WorkerQueues, params: Params, rng: np.random.Generator) -> Demand:
    """A step has at most `budget_tokens` tokens: one per decode and the rest for prompts, in order.
    The held memory fits under `watermark` · capacity (vLLM's max_num_batched_tokens; stall-free
    batching, Sarathi-Serve, OSDI 2024, Algorithm 3). Workers split the prompts; this rule withholds
    requests for which a step has no token."""
    jobs = queues.jobs
    cost = np.maximum(jobs.context - jobs.held, 1).astype(float)
    limits, budget = params["watermark"] * queues.rooms, params["budget_tokens"]
    return StepBudgetDemand(needed_tokens(queues), limits, cost, budget)


def _worst(queues: WorkerQueues) -> Floats:
    return whole_blocks(queues.jobs.longest, queues.block_tokens).astype(float)


BATCH_SIZE = {"batch_size": Param(7, 1, 4_096)}
TOKEN_BUDGET = {"budget_tokens": Param(2_048, 1, 2**24), "watermark": Param(0.95, 0.0, 1.0)}
