"""Forming by the tokens of a step: decodes first, then as much of the prompts as the budget
allows."""

from dataclasses import dataclass

import numpy as np

from services.forecast import Floats, Ints
from services.policies.decision import WaitReason
from services.policies.form.demand import Demand, Need, WorkerQueue, needed
from services.policies.form.sums import Sums
from services.policies.parameters import Param, Params
from services.policies.snapshot import Bools


@dataclass(frozen=True, slots=True)
class Steps(Demand):
    """In addition to memory: `cost`, the tokens that each request adds to the next steps, and the
    `budget` of one step.

    An admitted request finds room for at least one token: the last prompt is split into chunks of
    what is left, so that a prompt longer than the budget need not wait for an idle worker. O(jobs).
    """

    cost: Floats
    budget: float

    def longest(self, order: Ints, base: int, most: int) -> tuple[int, Need]:
        fits, need = Sums(self.held, self.limit).longest(order, base, most)
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


def token_budget(queue: WorkerQueue, params: Params, rng: np.random.Generator) -> Demand:
    """A step has at most `budget_tokens` tokens: one per decode and the rest for prompts, in order.
    The held memory fits under `watermark` · capacity (vLLM's max_num_batched_tokens; stall-free
    batching, Sarathi-Serve, OSDI 2024, Algorithm 3). Workers split the prompts; this rule withholds
    requests for which a step has no token."""
    jobs, worker = queue.jobs, queue.worker
    cost = np.maximum(jobs.context - jobs.held, 1).astype(float)
    return Steps(
        needed(queue), params["watermark"] * worker.room_tokens, cost, params["budget_tokens"]
    )


PARAMS = {"budget_tokens": Param(2_048, 1, 2**24), "watermark": Param(0.95, 0.0, 1.0)}
