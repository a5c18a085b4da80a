"""Moves requests away from workers that are draining.

A running request is paused as a round pauses it: the worker confirms that it stopped before the
request starts elsewhere. A request that no other worker could run continues to its end there.
"""

import numpy as np

from services.core import Residency
from services.scheduler.core.jobs import WorkerJobs
from services.scheduler.core.ledger import Ledger
from services.scheduler.core.phases import RequestPhase


def evacuate_all(ledger: Ledger) -> bool:
    """Moves requests away from every draining worker, at the start of each round; returns whether
    there is one. O(workers), and O(rows) for each that is draining."""
    draining = [worker for worker in ledger.workers.values() if worker.draining]
    for worker in draining:
        _evacuate(ledger, worker)
    return bool(draining)


def _evacuate(ledger: Ledger, worker: WorkerJobs) -> None:
    columns = ledger.board.jobs
    staying = [other for other in ledger.workers.values() if not other.draining]
    for job in ledger.jobs_with_home(worker):
        if ledger.phase(job) is not RequestPhase.RUNNING:
            if job.request_id not in worker.pausing:
                ledger.leave_home(job)
        elif any(other.could_run(job.request) for other in staying):
            ledger.pause([job], Residency.DROP)
        elif columns.limit[job.row] < columns.cap[job.row]:
            ledger.extend(row := np.array([job.row]), columns.cap[row])
