"""How many tokens one who runs may make before it is looked at again."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from services.forecast import Ints
from services.policies.parameters import Param, Params
from services.policies.snapshot import Candidates, WorkerSnapshot


@dataclass(frozen=True, slots=True)
class Slice:
    """`limits` says, of those who run next at a worker (positions in the contest, the most urgent
    first), the output each may have made before it stops by itself. `returns`: whoever has made
    it goes back to the pool, and stands in the line as those who wait do."""

    limits: Callable[[Candidates, WorkerSnapshot, Ints, Params], Ints]
    params: dict[str, Param] = field(default_factory=dict)
    returns: bool = False


def whole(contest: Candidates, worker: WorkerSnapshot, at: Ints, params: Params) -> Ints:
    """All that was asked for: sequence-level scheduling."""
    return contest.jobs.cap[at]


def tokens(contest: Candidates, worker: WorkerSnapshot, at: Ints, params: Params) -> Ints:
    """`slice_tokens` beyond what is there (ALGORITHMS 4). Who runs and has half a slice left
    goes on with what it has; the next half is granted in good time, so that planning never
    stalls the device."""
    jobs, runs = contest.jobs, contest.is_running[at]
    output, limit, cap = jobs.output[at], jobs.limit[at], jobs.cap[at]
    slice_tokens = int(params["slice_tokens"])
    fresh = np.minimum(cap, output + slice_tokens)
    enough = runs & (limit - output > slice_tokens // 2)
    return np.where(enough, limit, np.maximum(fresh, np.where(runs, limit, 0)))


def turns(contest: Candidates, worker: WorkerSnapshot, at: Ints, params: Params) -> Ints:
    """`slice_tokens`, and nothing more before they are made: then back to the pool, with whatever
    has arrived meanwhile (papers/003 §4.1)."""
    jobs = contest.jobs
    output, limit, cap = jobs.output[at], jobs.limit[at], jobs.cap[at]
    fresh = np.minimum(cap, output + int(params["slice_tokens"]))
    return np.where(contest.is_running[at] & (output < limit), limit, fresh)


def promised(contest: Candidates, worker: WorkerSnapshot, at: Ints, params: Params) -> Ints:
    """As many as can be made before the first token of somebody who waits here or anywhere is due,
    `slice_tokens` at least: so a worker comes back by itself before a promise is broken, though no
    plan should reach it. All that was asked for while nobody waits for a first token that is due.
    Who runs is not told a number that hardly differs from what it has."""
    jobs, runs = contest.jobs, contest.is_running[at]
    output, limit, cap = jobs.output[at], jobs.limit[at], jobs.cap[at]
    due_s = (jobs.arrival_s + jobs.ttft_s - contest.now)[~contest.is_running & (jobs.output == 0)]
    least_s = float(np.min(due_s[due_s > 0], initial=np.inf))
    if np.isinf(least_s):
        return cap
    context = float(np.mean(jobs.context[at])) if len(at) else 0.0
    step_s = worker.cost.step_s(0, len(at), len(at) * context)
    size = max(int(params["slice_tokens"]), int(min(least_s / max(step_s, 1e-6), 2.0**24)))
    enough = runs & (limit - output >= size // 2)
    return np.where(enough, limit, np.maximum(np.minimum(cap, output + size), limit * runs))


SLICE_TOKENS = {"slice_tokens": Param(32, 1, 2**24)}
SLICES: dict[str, Slice] = {
    "whole": Slice(whole),
    "tokens": Slice(tokens, SLICE_TOKENS),
    "promised": Slice(promised, SLICE_TOKENS),
    "turns": Slice(turns, SLICE_TOKENS, returns=True),
}
