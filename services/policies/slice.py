"""How many tokens a running request may make before it is reconsidered."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from services.forecast import Ints
from services.policies.cadence import steps_to_next_plan
from services.policies.parameters import Param, Params
from services.policies.snapshot import Candidates, WorkerSnapshot

PLANS = 2  # plan intervals that a slice outlasts


@dataclass(frozen=True, slots=True)
class Slice:
    """`limits` returns, for requests that may run next at a worker (candidate positions), the
    output up to which the plan counts with each, and at which it stops by itself. It depends on
    each request alone, not on the others asked for. A running request with a higher limit keeps
    that. `returns`: a request at its limit goes back to the pool and queues like waiting ones."""

    limits: Callable[[Candidates, WorkerSnapshot, Ints, Params], Ints]
    params: dict[str, Param] = field(default_factory=dict)
    returns: bool = False


def whole(candidates: Candidates, worker: WorkerSnapshot, at: Ints, params: Params) -> Ints:
    """The whole answer: sequence-level scheduling."""
    return candidates.jobs.cap[at]


def tokens(candidates: Candidates, worker: WorkerSnapshot, at: Ints, params: Params) -> Ints:
    """The whole answer if no request waits. Otherwise `slice_tokens` beyond the current output, and
    the steps of two plan intervals, so that the next half can be granted before the first is used
    up: planning never stalls the device. A running request with half a slice left gets no more.

    A step takes the time of the batch that runs now, not of the batch `at`: a request has the same
    limit when its memory is counted and when the plan grants it."""
    jobs, runs = candidates.jobs, candidates.is_running[at]
    output, limit, cap = jobs.output[at], jobs.limit[at], jobs.cap[at]
    if candidates.is_running.all():
        return cap
    here = (candidates.is_running & (jobs.home == worker.number)).nonzero()[0]
    context = float(np.sum(jobs.context_at(here)))
    steps = steps_to_next_plan(candidates.numbers, worker, max(1, len(here)), context)
    slice_tokens = round(params["slice_tokens"] + PLANS * steps)
    fresh = np.minimum(cap, output + slice_tokens)
    return np.where(runs & (limit - output > slice_tokens // 2), np.minimum(limit, fresh), fresh)


def turns(candidates: Candidates, worker: WorkerSnapshot, at: Ints, params: Params) -> Ints:
    """`slice_tokens`, with no extension before they are used up: then back to the pool, with the
    requests that arrived meanwhile (SCLS, §4.1)."""
    jobs = candidates.jobs
    output, limit, cap = jobs.output[at], jobs.limit[at], jobs.cap[at]
    fresh = np.minimum(cap, output + int(params["slice_tokens"]))
    return np.where(candidates.is_running[at] & (output < limit), limit, fresh)


SLICE_TOKENS = {"slice_tokens": Param(32, 1, 2**24)}
SLICES: dict[str, Slice] = {
    "whole": Slice(whole),
    "tokens": Slice(tokens, SLICE_TOKENS),
    "turns": Slice(turns, SLICE_TOKENS, returns=True),
}
