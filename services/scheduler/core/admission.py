"""Admission control: refuses requests that cannot be served, in O(1) per request."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

import numpy as np

from services.core import Reject, RejectReason, Request
from services.forecast import MAX_FORECAST_TOKENS, Floats, Ints
from services.policies.snapshot import Snapshot, WorkerSnapshot, distinct
from services.scheduler.core.ledger import Ledger

UNKNOWN_S = 1.0  # retry time while no worker is attached or measured
MAX_DRAIN_S = 600.0


@dataclass(frozen=True)
class SchedulerLimits:
    """Bounds of the scheduler. `adopt_s`: how long it waits for a worker or a gateway to return.
    `patience_s`: how long a new request waits for its first forecast, and nothing else; after that
    it is queued, and the scheduler assumes that it generates max_tokens until a forecast arrives.
    A served scheduler sets it to `forecast_patience_s`. `tenant_weights`: the default weight
    is 1. `suspect_s` and `suspect_gaps`: the silence after which a worker is suspected."""

    max_queue: int = 4_096
    adopt_s: float = 10.0
    patience_s: float = 0.001
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    suspect_s: float = inf
    suspect_gaps: float = 3.0


def find_refusal(
    ledger: Ledger, limits: SchedulerLimits, request: Request, drain_s: float, now: float
) -> Reject | None:
    """The reason to refuse this request, if there is one. `drain_s` is the drain time of its
    model's queue at the last round. Permanent reasons are checked before temporary ones. A request
    that names a worker skips the check against attached workers: its worker may attach later."""
    if request.request_id in ledger.jobs:
        return Reject(RejectReason.DUPLICATE, f"request id {request.request_id} is in use")
    if reject := check_lengths(request):
        return reject
    if not request.worker_id and (reject := check_servable(ledger, request)):
        return reject
    wait_s = max(UNKNOWN_S, drain_s)
    if _is_full(ledger, limits, request.model):
        return Reject(
            RejectReason.QUEUE_FULL,
            f"{limits.max_queue} requests are waiting; try again in {wait_s:.0f} s",
            wait_s,
        )
    left_s = request.deadline_s - now
    begun = request.delivered_tokens or request.worker_id
    if ledger.waiting_for(request.model) and drain_s > left_s and not begun:
        return Reject(
            RejectReason.TOO_LATE,
            f"the queue drains in about {drain_s:.0f} s, longer than the {max(0.0, left_s):.1f} s "
            f"until the deadline; try again in {wait_s:.0f} s, or with a later deadline",
            wait_s,
        )
    return None


def _is_full(ledger: Ledger, limits: SchedulerLimits, model: str) -> bool:
    """A full queue still accepts a model that has less than its share of it, so that a long queue
    for one model never shuts out another. At most twice the limit wait."""
    if ledger.waiting < limits.max_queue:
        return False
    served = {worker.view.model for worker in ledger.workers.values()}
    return model not in served or ledger.waiting_for(model) >= limits.max_queue / len(served)


def check_lengths(request: Request) -> Reject | None:
    """Refuses lengths that no request may have."""
    prompt, most = request.prompt_tokens, request.max_tokens
    if min(prompt, most) < 1 or request.delivered_tokens < 0:
        return Reject(
            RejectReason.TOO_LONG,
            f"prompt ({prompt}) and max_tokens ({most}) must each be at least 1 token",
        )
    if prompt + most > MAX_FORECAST_TOKENS:
        return Reject(
            RejectReason.TOO_LONG,
            f"prompt ({prompt}) + max_tokens ({most}) = {prompt + most} tokens, "
            f"but no request may be longer than {MAX_FORECAST_TOKENS} tokens",
        )
    return None


def check_servable(ledger: Ledger, request: Request) -> Reject | None:
    """Refuses a request that no attached worker could ever run. Without any worker it is accepted:
    one may attach that can."""
    workers = ledger.workers.values()
    if not workers or any(worker.could_run(request) for worker in workers):
        return None
    reach = [worker.view.reach_tokens for worker in workers if worker.serves(request)]
    if not reach:
        served = ", ".join(sorted({worker.view.model for worker in workers}))
        return Reject(
            RejectReason.NO_MODEL, f"no worker serves the model {request.model!r}; known: {served}"
        )
    total = request.prompt_tokens + request.max_tokens
    return Reject(
        RejectReason.TOO_LONG,
        f"prompt ({request.prompt_tokens}) + max_tokens ({request.max_tokens}) = {total} "
        f"tokens, but the longest request that fits here is {max(reach)} tokens",
    )


def drain_times_s(snapshot: Snapshot) -> dict[int, float]:
    """Seconds until the queue of each model is served: the tokens still expected of its running and
    queued requests, over its workers' rate at their present batch size and context. A lower bound
    where memory keeps requests out. O(jobs), vectorised, once a round."""
    if not len(snapshot.queued):
        return {}
    jobs = snapshot.live
    lefts = np.maximum(jobs.total - jobs.output, 0.0)
    drains: dict[int, float] = {}
    speeds = _speeds(snapshot)
    all_models = distinct(jobs.model)
    models = distinct(jobs.model[: len(snapshot.queued)])
    for model in models:
        left = float(np.sum(lefts if len(all_models) == 1 else lefts[jobs.model == model]))
        rate = sum(speeds[w.number] for w in snapshot.workers if w.model == model)
        drains[model] = min(MAX_DRAIN_S, left / rate) if rate > 0 else UNKNOWN_S
    return drains


def _speeds(snapshot: Snapshot) -> dict[int, float]:
    """Tokens per second that each worker generates with its running requests, by its number."""
    jobs, running = snapshot.jobs, snapshot.running
    numbers = [worker.number for worker in snapshot.workers]
    size, home = max(numbers, default=0) + 1, jobs.home[running]
    counts = np.bincount(home, minlength=size).tolist()
    contexts = np.bincount(home, jobs.context_at(running), size).tolist()
    speeds = {}
    for number, worker in zip(numbers, snapshot.workers, strict=True):
        seqs = max(1, counts[number])
        speeds[number] = worker.cost.decode_tokens_per_s(seqs, contexts[number] / seqs)
    return speeds


def fastest_prefill_s(workers: tuple[WorkerSnapshot, ...], tokens: Ints) -> Floats:
    """The time to prefill each of these lengths alone, on the fastest worker."""
    base_s = min(worker.cost.base_s for worker in workers)
    token_s = min(worker.cost.prefill_token_s for worker in workers)
    return np.asarray(base_s + token_s * tokens, float)


def find_unreachable_deadlines(snapshot: Snapshot) -> list[int]:
    """Queued rows that could not produce one more token by their deadline if they ran at once on
    the fastest worker: they end now instead of at the deadline."""
    jobs, queued = snapshot.jobs, snapshot.queued
    dated = queued[jobs.deadline_s[queued] < inf]
    if not len(dated) or not snapshot.workers:
        return []
    ready_s = snapshot.now + fastest_prefill_s(snapshot.workers, jobs.missing_at(dated))
    late: list[int] = dated[ready_s > jobs.deadline_s[dated]].tolist()
    return late
