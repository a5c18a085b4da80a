"""What is said of a request that has ended, to its gateway and to who learns from it."""

from math import inf

from services.core import FinishReason, Outcome
from services.scheduler.core.board import RequestPhase
from services.scheduler.core.events import Finish, Learn
from services.scheduler.core.jobs import Job
from services.scheduler.core.ledger import Ledger


def finish(
    ledger: Ledger, job: Job, reason: FinishReason, output_tokens: int, now: float, message: str
) -> Finish:
    runs = ledger.phase(job) is RequestPhase.RUNNING
    since_s = float(ledger.board.jobs.since_s[job.row])
    waiting_s = 0.0 if runs else now - (since_s if since_s < inf else job.request.arrival_s)
    return Finish(
        job.link,
        job.request_id,
        reason,
        output_tokens,
        ledger.preemptions(job),
        job.queued_s + waiting_s,
        message,
    )


def learn(ledger: Ledger, job: Job, reason: FinishReason, output_tokens: int, now: float) -> Learn:
    request = job.request
    return Learn(
        Outcome(
            request.request_id,
            request.model,
            request.application,
            request.prompt_tokens,
            output_tokens,
            request.max_tokens,
            reason,
            now - request.arrival_s,
            ledger.preemptions(job),
        )
    )
