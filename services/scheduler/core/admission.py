"""Who is let in, and who is told in time that it can't be served: all O(1) a request."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

import numpy as np

from services.core import Reject, RejectReason, Request
from services.forecast import MAX_FORECAST_TOKENS
from services.policies.snapshot import Snapshot, WorkerSnapshot
from services.scheduler.core.ledger import Ledger

UNKNOWN_S = 1.0  # nothing attached or measured yet: ask again soon
LONGEST_S = 600.0


@dataclass(frozen=True)
class Limits:
    """Bounds of what the scheduler keeps; for how long it waits for who may come back, and for a
    forecast: who has none by then is taken to make all that it may, and runs where there is room
    for that. `tenant_weights`: whoever is not named there has 1."""

    max_queue: int = 4_096
    adopt_s: float = 10.0
    patience_s: float = 0.001
    tenant_weights: Mapping[str, float] = field(default_factory=dict)


def refusal(
    ledger: Ledger, limits: Limits, request: Request, drain_s: float, now: float
) -> Reject | None:
    """Why this request can't be taken, if so. `drain_s` is how long its model's queue takes by the
    last round's reckoning. What will never be served is told before what can't be now; and who is
    said to be at a worker already is let in: that worker may only come after it."""
    if request.request_id in ledger.jobs:
        return Reject(RejectReason.DUPLICATE, f"request id {request.request_id} is in use")
    if reject := senseless(request):
        return reject
    if not request.worker_id and (reject := unservable(ledger, request)):
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
            f"the queue takes some {drain_s:.0f} s, longer than the {max(0.0, left_s):.1f} s that "
            f"this request has; try again in {wait_s:.0f} s, or with a later deadline",
            wait_s,
        )
    return None


def _is_full(ledger: Ledger, limits: Limits, model: str) -> bool:
    """A full queue is still open to a model that has not had its share of it: a long queue for
    one never shuts out another's. So twice the limit wait at most."""
    if ledger.waiting < limits.max_queue:
        return False
    served = {worker.view.model for worker in ledger.workers.values()}
    return model not in served or ledger.waiting_for(model) >= limits.max_queue / len(served)


def senseless(request: Request) -> Reject | None:
    """Lengths that no request can have."""
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


def unservable(ledger: Ledger, request: Request) -> Reject | None:
    """No worker there is could ever run it. While none is there, one may come that can."""
    workers = ledger.workers.values()
    reach = [w.view.reach_tokens for w in workers if w.view.model == request.model]
    if workers and not reach:
        served = ", ".join(sorted({worker.view.model for worker in workers}))
        return Reject(
            RejectReason.NO_MODEL, f"no worker serves the model {request.model!r}; known: {served}"
        )
    total = request.prompt_tokens + request.max_tokens
    if not reach or total <= max(reach):
        return None
    return Reject(
        RejectReason.TOO_LONG,
        f"prompt ({request.prompt_tokens}) + max_tokens ({request.max_tokens}) = {total} "
        f"tokens, but the longest request that fits here is {max(reach)} tokens",
    )


def drains_s(snapshot: Snapshot) -> dict[int, float]:
    """Of each model for which somebody waits, the seconds until all of them have been served: the
    tokens still expected of all, over its workers' rate at their present concurrency and context.
    A lower bound when memory keeps requests out. O(jobs), vectorised, once a round."""
    jobs = snapshot.jobs
    rows = np.concatenate([snapshot.queued, snapshot.running])
    left = np.maximum(jobs.total[rows] - jobs.output[rows], 0.0)
    drains: dict[int, float] = {}
    for model in np.unique(jobs.model[snapshot.queued]).tolist():
        ahead = float(np.sum(left[jobs.model[rows] == model]))
        rate = sum(_rate(snapshot, worker) for worker in snapshot.workers if worker.model == model)
        drains[model] = min(LONGEST_S, ahead / rate) if rate > 0 else UNKNOWN_S
    return drains


def _rate(snapshot: Snapshot, worker: WorkerSnapshot) -> float:
    """Tokens a second that a worker makes of those that run there."""
    jobs = snapshot.jobs
    here = snapshot.running[jobs.home[snapshot.running] == worker.number]
    seqs = max(1, len(here))
    context = float(np.sum(jobs.prompt[here] + jobs.output[here])) / seqs
    return worker.cost.decode_tokens_per_s(seqs, context)


def hopeless(snapshot: Snapshot) -> list[int]:
    """Rows that wait and could not have one more token by their deadline, if they ran at once on
    the fastest worker: they are told so now instead of when it has passed."""
    jobs, queued = snapshot.jobs, snapshot.queued
    dated = queued[jobs.deadline_s[queued] < inf]
    if not len(dated) or not snapshot.workers:
        return []
    base_s = min(worker.cost.base_s for worker in snapshot.workers)
    prefill_s = min(worker.cost.prefill_token_s for worker in snapshot.workers)
    missing = np.maximum(jobs.prompt[dated] + jobs.output[dated] - jobs.held[dated], 0)
    ready_s = snapshot.now + base_s + missing * prefill_s
    late: list[int] = dated[ready_s > jobs.deadline_s[dated]].tolist()
    return late
