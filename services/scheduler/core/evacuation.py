"""A worker that is leaving gets nobody any more, and what it has goes to the others.

Who runs there is paused, as a round pauses: the worker says that it stopped before it is begun
elsewhere, so that nobody ends unseen. Whom no other worker takes may go on to its end there.
"""

from services.core import Residency
from services.scheduler.core.board import RequestPhase
from services.scheduler.core.jobs import Job, WorkerJobs
from services.scheduler.core.ledger import Ledger


def evacuate_all(ledger: Ledger, now: float) -> bool:
    """At the beginning of each round; whether anybody is leaving. O(workers), and O(rows) for each
    that is."""
    leaving = [worker for worker in ledger.workers.values() if worker.leaving]
    for worker in leaving:
        _evacuate(ledger, worker, now)
    return bool(leaving)


def _evacuate(ledger: Ledger, worker: WorkerJobs, now: float) -> None:
    board = ledger.board.jobs
    for job in ledger.jobs_at(worker):
        if ledger.phase(job) is not RequestPhase.RUNNING:
            if job.request_id not in worker.pausing:
                ledger.leave_home(job)
        elif _others_take(ledger, job):
            ledger.pause(job, worker, Residency.DROP, now)
        elif board.limit[job.row] < board.cap[job.row]:
            ledger.extend(job, worker, int(board.cap[job.row]))


def _others_take(ledger: Ledger, job: Job) -> bool:
    """Whether a worker that stays could run it, places and memory aside."""
    request = job.request
    total = request.prompt_tokens + request.max_tokens
    return any(
        worker.view.model == request.model and total <= worker.view.reach_tokens
        for worker in ledger.workers.values()
        if not worker.leaving
    )
