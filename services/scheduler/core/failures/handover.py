"""Keeps requests at workers that come back, and moves them away from workers that drain or hang.

After a restart of the scheduler or a reconnect of a worker, two sides announce a request that the
worker still has, in any order: the worker lists it in its hello, and a gateway that received
tokens of it submits it again and names the worker.

    orphan     its worker is attached, no gateway has submitted it: it keeps its slot and memory
    awaiting   it was submitted, and its worker is not attached
    adopted    both are here: its worker continues it

Both wait for `SchedulerLimits.adopt_s`. Then the worker forgets the orphan, and the awaiting
request is queued from its tokens.

A running request of a draining worker is paused as a round pauses it: the worker confirms that it
stopped before the request starts elsewhere. A request that no other worker could run continues to
its end there.

A suspected worker confirms nothing. Its requests are queued at once where others have room. Its
copies are cancelled when it reads its plans again, and gateways drop its late tokens.
"""

from dataclasses import dataclass
from math import inf

import numpy as np

from services.core import HeldRequest, Request, Residency
from services.scheduler.core.admission import check_servable
from services.scheduler.core.events import Displace, Suspect, WorkerAttached
from services.scheduler.core.failures.suspicion import CHECK_S, SuspicionLimits
from services.scheduler.core.jobs import Job, WorkerJobs
from services.scheduler.core.ledger import Ledger
from services.scheduler.core.phases import RequestPhase, TransitionCause

# Workers


def attach(ledger: Ledger, event: WorkerAttached) -> WorkerJobs:
    """Attaches a worker; it displaces another with its name. Requests that awaited it and that it
    does not have are queued. Waiting requests that no attached worker could run are refused.
    O(jobs)."""
    worker_id = event.view.worker_id
    if known := ledger.workers.get(worker_id):
        ledger.actions.append(Displace(known.link, worker_id))
        ledger.displaced_workers += 1
        ledger.detach(worker_id)
    worker = ledger.attach(event.view, event.link)
    for held in event.held:
        _match(ledger, worker, held)
    for job in list(ledger.jobs.values()):
        phase = ledger.phase(job)
        if phase is RequestPhase.AWAITING_WORKER:
            if job.request.worker_id == worker_id:
                start_over(ledger, job)
        elif phase is not RequestPhase.RUNNING:
            _refuse_if_unservable(ledger, job)
    return worker


def abandon_orphans(ledger: Ledger, worker_id: str) -> bool:
    """Lets a worker forget its orphans; returns whether it had any."""
    worker = ledger.workers.get(worker_id)
    if worker is None or not worker.orphans:
        return False
    for request_id in worker.orphans:
        worker.draft.forget(request_id)
    worker.orphans.clear()
    return True


def _match(ledger: Ledger, worker: WorkerJobs, held: HeldRequest) -> None:
    """Adopts a request that a worker has from before, unless it is elsewhere by now."""
    job = ledger.jobs.get(held.request_id)
    if job is None:
        worker.orphans[held.request_id] = held
    elif ledger.home(job):
        worker.draft.forget(held.request_id)
    else:
        ledger.adopt(job, worker, held)


# Requests


def find_home(ledger: Ledger, job: Job) -> None:
    """Adopts a new request if its gateway names a worker; else awaits the worker or queues it."""
    worker = ledger.workers.get(job.request.worker_id)
    if worker is None:
        ledger.await_worker(job)
    elif held := worker.orphans.pop(job.request_id, None):
        ledger.adopt(job, worker, held)
    else:
        ledger.note(job, TransitionCause.NOT_HELD)


def drop_other_orphans(ledger: Ledger, request: Request) -> None:
    """Lets every worker that the gateway does not name forget its orphan of this request: the
    request could otherwise be admitted there a second time. O(workers)."""
    for worker_id, worker in ledger.workers.items():
        if worker_id != request.worker_id and request.request_id in worker.orphans:
            del worker.orphans[request.request_id]
            worker.draft.forget(request.request_id)


def start_over(ledger: Ledger, job: Job) -> None:
    """Queues a request after its worker did not attach again, or attached without it. The gateway
    sends the prompt again."""
    ledger.enqueue(job, TransitionCause.NOT_HELD)
    _refuse_if_unservable(ledger, job)


def _refuse_if_unservable(ledger: Ledger, job: Job) -> None:
    if reject := check_servable(ledger, job.request):
        ledger.refuse(job, reject)


# Draining and suspected workers


def evacuate_all(ledger: Ledger) -> bool:
    """Moves requests away from every worker that takes none, at the start of each round; returns
    whether there is one. O(workers), and O(rows) for each such worker."""
    leaving = [worker for worker in ledger.workers.values() if not worker.takes_requests]
    for worker in leaving:
        if worker.suspected:
            _withdraw(ledger, worker)
        else:
            _evacuate(ledger, worker)
    return bool(leaving)


class SilenceWatch:
    """Checks the silence of the workers every CHECK_S, unless the limits are infinite."""

    def __init__(self, ledger: Ledger, limits: SuspicionLimits):
        self._ledger, self._limits = ledger, limits
        self._checked_s = -inf

    @property
    def due_s(self) -> float:
        """The time of the next check; infinite without one."""
        watches = self._ledger.workers and self._limits.least_s < inf
        return self._checked_s + CHECK_S if watches else inf

    def check(self, now: float) -> bool:
        """Counts a further turn of each worker's silence; returns whether one is suspected, or
        trusted again. O(workers)."""
        ledger, turn_s, changed = self._ledger, now - self._checked_s, False
        self._checked_s = now
        for worker_id, worker in ledger.workers.items():
            before = worker.silence.suspected
            heard = worker.heard or not worker.beats
            worker.silence = worker.silence.after(turn_s, heard, self._limits)
            worker.heard = False
            if before != worker.silence.suspected:
                ledger.suspicions += not before
                ledger.actions.append(Suspect(worker_id, not before))
                changed = True
        return changed


def _withdraw(ledger: Ledger, worker: WorkerJobs) -> None:
    """Queues the requests of a silent worker that other workers have room for. Its copies are
    cancelled by the next plan, and it takes no requests until it has applied that plan."""
    rooms = [
        _Room(other, other.slots - len(other.running), other.free_blocks)
        for other in ledger.workers.values()
        if other.takes_requests
    ]
    jobs = [
        job
        for job in ledger.jobs_with_home(worker)
        if any(room.take(job.request, ledger.output(job)) for room in rooms)
    ]
    if jobs:
        for job in jobs:
            worker.draft.forget(job.request_id)
        ledger.withdraw(jobs, worker)
        worker.fence_seq = worker.plan_seq + 1


@dataclass(slots=True)
class _Room:
    """The slots and device blocks of a worker that are free for further requests."""

    worker: WorkerJobs
    slots: int
    blocks: int

    def take(self, request: Request, output: int) -> bool:
        """Reserves room for a request with this output so far; returns whether there was any."""
        blocks = (request.prompt_tokens + output) // self.worker.view.block_tokens + 1
        if not (self.slots > 0 and blocks <= self.blocks and self.worker.could_run(request)):
            return False
        self.slots, self.blocks = self.slots - 1, self.blocks - blocks
        return True


def _evacuate(ledger: Ledger, worker: WorkerJobs) -> None:
    columns = ledger.board.jobs
    staying = [other for other in ledger.workers.values() if other.takes_requests]
    for job in ledger.jobs_with_home(worker):
        if ledger.phase(job) is not RequestPhase.RUNNING:
            if job.request_id not in worker.pausing:
                ledger.leave_home(job)
        elif any(other.could_run(job.request) for other in staying):
            ledger.pause([job], Residency.DROP)
        elif columns.limit[job.row] < columns.cap[job.row]:
            ledger.extend(row := np.array([job.row]), columns.cap[row])
