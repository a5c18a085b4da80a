"""How many tokens a running request may make before it is reconsidered."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from services.forecast import Ints
from services.policies.cadence import steps_to_next_plan
from services.policies.parameters import Param, Params
from services.policies.snapshot import NOWHERE, Candidates

PLANS = 2  # plan intervals that a slice outlasts


@dataclass(frozen=True, slots=True)
class Slice:
    """`limits` returns, for requests that may run next (candidate positions), each at the worker
    with the number in `homes` or all at one, the output up to which the plan counts with each, and
    at which it stops by itself. It depends on each request and its worker, not on the others asked
    for. A running request with a higher limit keeps that. `returns`: a request at its limit goes
    back to the pool and queues like waiting ones."""

    limits: Callable[[Candidates, Ints | int, Ints, Params], Ints]
    params: dict[str, Param] = field(default_factory=dict)
    returns: bool = False


def whole(candidates: Candidates, homes: Ints | int, at: Ints, params: Params) -> Ints:
    """The whole answer: sequence-level scheduling."""
    return candidates.jobs.cap[at]


def tokens(candidates: Candidates, homes: Ints | int, at: Ints, params: Params) -> Ints:
    """The whole answer if no request waits. Otherwise `slice_tokens` beyond the current output, and
    the steps of two plan intervals, so that the next half can be granted before the first is used
    up: planning never stalls the device. A running request with half a slice left gets no more.

    A step takes the time of the batch that runs now, not of the batch `at`."""
    jobs, runs = candidates.jobs, candidates.is_running[at]
    output, limit, cap = jobs.output[at], jobs.limit[at], jobs.cap[at]
    if candidates.is_running.all():
        return cap
    slice_tokens = _slice_tokens(candidates, params)[homes]
    fresh = np.minimum(cap, output + slice_tokens)
    return np.where(runs & (limit - output > slice_tokens // 2), np.minimum(limit, fresh), fresh)


def _slice_tokens(candidates: Candidates, params: Params) -> Ints:
    """The tokens of a slice, by the number of its worker."""
    jobs, numbers = candidates.jobs, [worker.number for worker in candidates.workers]
    here = (candidates.is_running & (jobs.home != NOWHERE)).nonzero()[0]
    home, size = jobs.home[here], max(numbers, default=0) + 1
    seqs = np.bincount(home, minlength=size).tolist()
    contexts = np.bincount(home, jobs.context_at(here), size).tolist()
    found = np.zeros(size, np.int64)
    for number, worker in zip(numbers, candidates.workers, strict=True):
        batch = max(1, seqs[number]), contexts[number]
        steps = steps_to_next_plan(candidates.numbers, worker, *batch)
        found[number] = round(params["slice_tokens"] + PLANS * steps)
    return found


def turns(candidates: Candidates, homes: Ints | int, at: Ints, params: Params) -> Ints:
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
