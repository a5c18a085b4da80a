"""Forms that add up: each job counts for a fixed number of tokens, and their sum must fit."""

from dataclasses import dataclass

import numpy as np

from services.forecast import Floats, Ints
from services.policies.form.demand import Demand, Need, WorkerQueue, needed
from services.policies.parameters import Param, Params


@dataclass(frozen=True, slots=True)
class Sums(Demand):
    """Nobody grows beyond what it is counted for. O(jobs)."""

    def longest(self, order: Ints, base: int, most: int) -> tuple[int, Need]:
        totals = np.cumsum(self.held[order])
        needs = np.concatenate([[totals[base - 1] if base else 0.0], totals[base:]])
        fit = int(np.searchsorted(needs, self.limit, side="right")) - 1
        return min(most, max(0, fit)), lambda count: float(needs[count])


def aggressive(queue: WorkerQueue, params: Params, rng: np.random.Generator) -> Demand:
    """What is held now fits under `watermark` · capacity; outputs are not foreseen at all
    (vLLM's way; papers/000 §2, which tries 0.90 to 0.99)."""
    return Sums(needed(queue), params["watermark"] * queue.worker.room_tokens)


def conservative(queue: WorkerQueue, params: Params, rng: np.random.Generator) -> Demand:
    """The worst case fits in `overcommit` · capacity: Σ (prompt + max_tokens) (TGI's and
    FastGen's way; papers/000 §2). At 1 nobody is ever evicted; the paper also tries 1.25, 1.5."""
    return Sums(_worst(queue), params["overcommit"] * queue.worker.room_tokens)


def fixed(queue: WorkerQueue, params: Params, rng: np.random.Generator) -> Demand:
    """At most `batch_size` run together, and the worst case of all of them fits: nobody is ever
    evicted (ORCA's max batch size over memory reserved for max_tokens; Magnus' baseline CCB, which
    takes 7, papers/004 §IV-A)."""
    return Sums(_worst(queue), queue.worker.room_tokens, places=int(params["batch_size"]))


def sliced(queue: WorkerQueue, params: Params, rng: np.random.Generator) -> Demand:
    """What a slice can need at most fits in `zeta` · capacity: Σ (context + slice) (SCLS,
    papers/003 Eq. 7–9, without the padding of its static batches).

    Whoever is inside its slice counts for as far as that goes. Whoever comes to the next one must
    find room for it again, so that nobody is evicted inside a slice. (Under `defer` the paused keep
    their memory, so there that holds only of who comes in.)
    """
    jobs, worker = queue.jobs, queue.worker
    reach = worker.whole_blocks(jobs.prompt + np.maximum(queue.limits, jobs.output)).astype(float)
    due = queue.runs & (queue.limits > jobs.limit)
    return Sums(np.maximum(reach, needed(queue)), params["zeta"] * worker.room_tokens, due=due)


def _worst(queue: WorkerQueue) -> Floats:
    return queue.worker.whole_blocks(queue.jobs.prompt + queue.jobs.cap).astype(float)


BATCH_SIZE = {"batch_size": Param(7, 1, 4_096)}
