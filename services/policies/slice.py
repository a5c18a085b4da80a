"""How many tokens a running request may make before it is reconsidered."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from services.forecast import Ints
from services.policies.parameters import Param, Params
from services.policies.snapshot import Candidates, WorkerSnapshot


@dataclass(frozen=True, slots=True)
class Slice:
    """`limits` returns, for the requests that run next at a worker (candidate positions, the most
    urgent first), the output at which each stops by itself. `returns`: a request at its limit goes
    back to the pool and queues like waiting ones."""

    limits: Callable[[Candidates, WorkerSnapshot, Ints, Params], Ints]
    params: dict[str, Param] = field(default_factory=dict)
    returns: bool = False


def whole(candidates: Candidates, worker: WorkerSnapshot, at: Ints, params: Params) -> Ints:
    """The whole answer: sequence-level scheduling."""
    return candidates.jobs.cap[at]


def tokens(candidates: Candidates, worker: WorkerSnapshot, at: Ints, params: Params) -> Ints:
    """`slice_tokens` beyond the current output. A running request with half a slice left keeps its
    limit; the next half is granted early enough that planning never stalls the device."""
    jobs, runs = candidates.jobs, candidates.is_running[at]
    output, limit, cap = jobs.output[at], jobs.limit[at], jobs.cap[at]
    slice_tokens = int(params["slice_tokens"])
    fresh = np.minimum(cap, output + slice_tokens)
    enough = runs & (limit - output > slice_tokens // 2)
    return np.where(enough, limit, np.maximum(fresh, np.where(runs, limit, 0)))


def turns(candidates: Candidates, worker: WorkerSnapshot, at: Ints, params: Params) -> Ints:
    """`slice_tokens`, with no extension before they are used up: then back to the pool, with the
    requests that arrived meanwhile (SCLS, §4.1)."""
    jobs = candidates.jobs
    output, limit, cap = jobs.output[at], jobs.limit[at], jobs.cap[at]
    fresh = np.minimum(cap, output + int(params["slice_tokens"]))
    return np.where(candidates.is_running[at] & (output < limit), limit, fresh)


def promised(candidates: Candidates, worker: WorkerSnapshot, at: Ints, params: Params) -> Ints:
    """As many tokens as can be made before the first token of any waiting request is due, at least
    `slice_tokens`: a worker thus stops in time even if no plan reaches it. The whole answer while
    no waiting request has a first token due. A running request is not sent a limit that hardly
    differs from its own."""
    jobs, runs = candidates.jobs, candidates.is_running[at]
    output, limit, cap = jobs.output[at], jobs.limit[at], jobs.cap[at]
    due_s = (jobs.arrival_s + jobs.ttft_s - candidates.now)[
        ~candidates.is_running & (jobs.output == 0)
    ]
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
