"""Workers and the requests that they have from before: who meets again stays where it is.

A scheduler that is new, or a worker that comes back, learns of these from two sides, in any order.
The worker says which requests it has; a gateway that has tokens of one from a worker submits it
again and names that worker.

    orphan     its worker is here, nobody has asked for it: it keeps its place and its memory
    awaited    it was asked for, and its worker is not here
    adopted    both are: its worker goes on with it

Orphans and awaited ones wait for `Limits.adopt_s`; then the worker forgets the one, and the other
begins anew. What is returned is to be told, in order; time is the state's affair.
"""

from collections.abc import Iterator

from services.core import HeldRequest, Request
from services.scheduler.core.admission import unservable
from services.scheduler.core.board import RequestPhase
from services.scheduler.core.events import Action, Displace, Preempt, Refuse, Resume, WorkerAttached
from services.scheduler.core.jobs import Job, WorkerJobs
from services.scheduler.core.ledger import Ledger

# Workers


def attach(ledger: Ledger, event: WorkerAttached, now: float) -> list[Action]:
    """A worker comes, in the place of another that has its name. Whoever awaited it in vain begins
    anew, and whoever waits and could run on no worker that is here now is refused. O(jobs)."""
    worker_id = event.view.worker_id
    actions: list[Action] = []
    if known := ledger.workers.get(worker_id):
        actions.append(Displace(known.link, worker_id))
        actions += lose(ledger, worker_id, now)
    worker = ledger.attach(event.view, event.link)
    for held in event.held:
        actions += _meet(ledger, worker, held, now)
    for job in list(ledger.jobs.values()):
        phase = ledger.phase(job)
        if phase is RequestPhase.AWAITED:
            if job.request.worker_id == worker_id:
                actions += begin_anew(ledger, job)
        elif phase is not RequestPhase.RUNNING:
            actions += _refuse_unservable(ledger, job)
    return actions


def lose(ledger: Ledger, worker_id: str, now: float) -> list[Action]:
    """A worker is gone, with all that it had."""
    return [preempt(ledger, job) for job in ledger.detach(worker_id, now)]


def abandon_orphans(ledger: Ledger, worker_id: str) -> bool:
    """Nobody has asked for them: the worker may forget them. Whether there were any."""
    worker = ledger.workers.get(worker_id)
    if worker is None or not worker.orphans:
        return False
    for request_id in worker.orphans:
        worker.draft.forget(request_id)
    worker.orphans.clear()
    return True


def _meet(ledger: Ledger, worker: WorkerJobs, held: HeldRequest, now: float) -> Iterator[Action]:
    """A worker has this one from before: adopted if it is nowhere else by now."""
    job = ledger.jobs.get(held.request_id)
    if job is None:
        worker.orphans[held.request_id] = held
    elif ledger.home(job):
        worker.draft.forget(held.request_id)
    else:
        yield _adopt(ledger, job, worker, held, now)


# Requests


def find_home(ledger: Ledger, job: Job, now: float) -> Iterator[Action]:
    """A request, just added, whose gateway says that a worker has it already: adopted, awaited, or
    to be placed like any other."""
    worker = ledger.workers.get(job.request.worker_id)
    if worker is None:
        ledger.await_home(job)
    elif held := worker.orphans.pop(job.request_id, None):
        yield _adopt(ledger, job, worker, held, now)
    else:
        yield preempt(ledger, job)  # it is not there any more


def disown(ledger: Ledger, request: Request) -> None:
    """A request that is not asked for where a worker has it from before: that one forgets it, or it
    might be admitted there a second time. O(workers)."""
    for worker_id, worker in ledger.workers.items():
        if worker_id != request.worker_id and request.request_id in worker.orphans:
            del worker.orphans[request.request_id]
            worker.draft.forget(request.request_id)


def begin_anew(ledger: Ledger, job: Job) -> Iterator[Action]:
    """Its worker is back without it, or does not come: told first, so that its gateway sends the
    prompt to wherever it is placed."""
    yield preempt(ledger, job)
    ledger.enqueue(job)
    yield from _refuse_unservable(ledger, job)


def standing(ledger: Ledger, job: Job) -> Action:
    """Where it stands, to a gateway that may have missed it."""
    if ledger.phase(job) is RequestPhase.RUNNING:
        return Resume(job.link, job.request_id, ledger.held(job))
    return preempt(ledger, job)


def preempt(ledger: Ledger, job: Job) -> Preempt:
    """It runs nowhere."""
    return Preempt(job.link, job.request_id, ledger.output(job))


def _adopt(ledger: Ledger, job: Job, worker: WorkerJobs, held: HeldRequest, now: float) -> Action:
    ledger.adopt(job, worker, held, now)
    return standing(ledger, job)


def _refuse_unservable(ledger: Ledger, job: Job) -> Iterator[Action]:
    if reject := unservable(ledger, job.request):
        yield Refuse(job.link, job.request_id, reject)
        ledger.drop(job)
