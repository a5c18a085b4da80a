"""Who is let in, and who is told in time that it can't be served: all O(1) a request."""

from dataclasses import dataclass
from math import inf

import numpy as np

from services.core import Reject, RejectReason, Request
from services.policies.snapshot import Snapshot, Worker
from services.scheduler.ledger import Ledger

UNKNOWN_S = 1.0  # nothing attached or measured yet: ask again soon
LONGEST_S = 600.0


@dataclass(frozen=True)
class Limits:
    """Bounds of what the scheduler keeps, and for how long it waits for what may come back."""

    max_queue: int = 4_096
    adopt_s: float = 10.0


def refusal(
    ledger: Ledger, limits: Limits, request: Request, drain_s: float, now: float
) -> Reject | None:
    """Why this request can't be taken, if so. `drain_s` is how long the queue takes by the last
    round's reckoning."""
    if request.request_id in ledger.jobs:
        return Reject(RejectReason.DUPLICATE, f"request id {request.request_id} is in use")
    wait_s = max(UNKNOWN_S, drain_s)
    if ledger.waiting >= limits.max_queue:
        return Reject(
            RejectReason.QUEUE_FULL,
            f"{limits.max_queue} requests are waiting; try again in {wait_s:.0f} s",
            wait_s,
        )
    left_s = request.deadline_s - now
    if ledger.waiting and drain_s > left_s and not request.delivered_tokens:
        return Reject(
            RejectReason.TOO_LATE,
            f"the queue takes some {drain_s:.0f} s, longer than the {max(0.0, left_s):.1f} s that "
            f"this request has; try again in {wait_s:.0f} s, or with a later deadline",
            wait_s,
        )
    return unservable(ledger, request)


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


def drain_s(snapshot: Snapshot) -> float:
    """Seconds until those who wait have been served: the tokens still expected of them, over the
    fleet's rate at its present concurrency and context. 0 while nobody waits; a lower bound when
    memory keeps requests out. O(waiting), vectorised, once a round."""
    if not len(snapshot.queued):
        return 0.0
    jobs, rows = snapshot.jobs, snapshot.queued
    ahead = float(np.sum(np.maximum(jobs.total[rows] - jobs.output[rows], 0.0)))
    rate = sum(_rate(snapshot, worker) for worker in snapshot.workers)
    return min(LONGEST_S, ahead / rate) if rate > 0 else UNKNOWN_S


def _rate(snapshot: Snapshot, worker: Worker) -> float:
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
