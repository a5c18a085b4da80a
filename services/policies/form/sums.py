"""Forms that add up: each job counts with a fixed number of tokens, and the sum must fit in the
memory, or in the memory and in the token budget of a step."""

from dataclasses import dataclass

import numpy as np

from services.forecast import Floats, Ints
from services.policies.decision import WaitReason
from services.policies.form.demand import Demand, Need, WorkerQueue, needed_tokens
from services.policies.parameters import Param, Params
from services.policies.snapshot import Bools


@dataclass(frozen=True, slots=True)
class SumDemand(Demand):
    """A job never needs more than it counts for. O(jobs)."""

    def count_fitting(self, order: Ints, base: int, most: int) -> tuple[int, Need]:
        totals = self.held[order].cumsum()
        needs = np.concatenate([[totals[base - 1] if base else 0.0], totals[base:]])
        fit = int(needs.searchsorted(self.limit, side="right")) - 1
        return min(most, max(0, fit)), lambda count: float(needs[count])


@dataclass(frozen=True, slots=True)
class StepBudgetDemand(Demand):
    """In addition to memory: `cost`, the tokens that each request adds to the next steps, and the
    `budget` of one step.

    An admitted request finds room for at least one token: the last prompt is split into chunks of
    what is left, so that a prompt longer than the budget need not wait for an idle worker. O(jobs).
    """

    cost: Floats
    budget: float

    def count_fitting(self, order: Ints, base: int, most: int) -> tuple[int, Need]:
        fits, need = SumDemand(self.held, self.limit).count_fitting(order, base, most)
        ahead = np.cumsum(self.cost[order]) - self.cost[order]
        within = int(np.searchsorted(ahead[base:], self.budget, side="left"))
        return min(fits, within), need

    def able(self, kept: Ints, later: Ints) -> Bools:
        fits = Demand.able(self, kept, later)
        return fits & (float(np.sum(self.cost[kept])) < self.budget)

    def refusal(self, order: Ints, need: float) -> tuple[WaitReason, float, float]:
        if need > self.limit:
            return WaitReason.MEMORY, need, self.limit
        return WaitReason.STEP_BUDGET, float(np.sum(self.cost[order])), self.budget


def aggressive(queue: WorkerQueue, params: Params, rng: np.random.Generator) -> Demand:
    """The memory held now fits under `watermark` · capacity; outputs are not forecast (vLLM's way;
    Past-Future, §2, which evaluates 0.90 to 0.99)."""
    return SumDemand(needed_tokens(queue), params["watermark"] * queue.worker.room_tokens)


def conservative(queue: WorkerQueue, params: Params, rng: np.random.Generator) -> Demand:
    """The worst case fits in `overcommit` · capacity: Σ (prompt + max_tokens) (TGI's and
    FastGen's way; Past-Future, §2). At 1 no request is ever evicted; the paper also evaluates
    1.25 and 1.5."""
    return SumDemand(_worst(queue), params["overcommit"] * queue.worker.room_tokens)


def fixed(queue: WorkerQueue, params: Params, rng: np.random.Generator) -> Demand:
    """At most `batch_size` requests run together, and their worst case fits: none is ever evicted
    (ORCA's maximum batch size with memory reserved for max_tokens; Magnus' baseline CCB with 7,
    §IV-A)."""
    return SumDemand(_worst(queue), queue.worker.room_tokens, slots=int(params["batch_size"]))


def sliced(queue: WorkerQueue, params: Params, rng: np.random.Generator) -> Demand:
    """The largest need of a slice fits in `zeta` · capacity: Σ (context + slice) (SCLS, Eq. 7–9,
    without the padding of its static batches).

    A request within its slice counts up to the slice's end. At the next slice it must find memory
    again, so that none is evicted within a slice. (Under `defer` paused requests keep their memory,
    so that this holds only for newly admitted ones.)
    """
    jobs, worker = queue.jobs, queue.worker
    reach = worker.whole_blocks(jobs.prompt + np.maximum(queue.limits, jobs.output)).astype(float)
    due = queue.is_running & (queue.limits > jobs.limit)
    return SumDemand(
        np.maximum(reach, needed_tokens(queue)), params["zeta"] * worker.room_tokens, due=due
    )


def token_budget(queue: WorkerQueue, params: Params, rng: np.random.Generator) -> Demand:
    """A step has at most `budget_tokens` tokens: one per decode and the rest for prompts, in order.
    The held memory fits under `watermark` · capacity (vLLM's max_num_batched_tokens; stall-free
    batching, Sarathi-Serve, OSDI 2024, Algorithm 3). Workers split the prompts; this rule withholds
    requests for which a step has no token."""
    jobs, worker = queue.jobs, queue.worker
    cost = np.maximum(jobs.context - jobs.held, 1).astype(float)
    return StepBudgetDemand(
        needed_tokens(queue),
        params["watermark"] * worker.room_tokens,
        cost,
        params["budget_tokens"],
    )


def _worst(queue: WorkerQueue) -> Floats:
    return queue.worker.whole_blocks(queue.jobs.longest).astype(float)


BATCH_SIZE = {"batch_size": Param(7, 1, 4_096)}
TOKEN_BUDGET = {"budget_tokens": Param(2_048, 1, 2**24), "watermark": Param(0.95, 0.0, 1.0)}
