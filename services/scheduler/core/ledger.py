"""Where every live request is: being forecast, awaited, queued, or running at a worker — in one
place only.

The ledger moves requests and notes what their workers must be told (each worker's draft). Why
and when they move is the affair of the state and of its rounds.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from math import inf

import numpy as np

from services.core import Grant, HeldRequest, Pause, Request, RequestProgress, Residency, WorkerView
from services.costs import CostModel
from services.forecast import Forecast, Ints
from services.policies.snapshot import WorkerSnapshot
from services.scheduler.core.board import Board, RequestPhase
from services.scheduler.core.jobs import Job, WorkerJobs

# Who stops one that runs: a plan, its worker for want of memory, or its worker's loss.
PREEMPTED_BY = ("paused", "evicted", "lost")
UNMEASURED = CostModel(base_s=0.01, prefill_token_s=1e-4, decode_seq_s=1e-4, context_token_s=0.0)


class Ledger:
    """Live jobs, the board and the workers. Owned by the state, changed by nobody else."""

    def __init__(self, tenant_weights: Mapping[str, float] | None = None) -> None:
        self.board = Board(tenant_weights)
        self.jobs: dict[str, Job] = {}
        self.workers: dict[str, WorkerJobs] = {}
        self.askers: dict[str, Job] = {}  # whose clients are told what is foreseen of them
        self.untold: dict[str, Job] = {}  # of these, who is told once a round has looked at it
        self.running = 0
        self.moves = 0  # admissions elsewhere than where KV rested, so far
        self.preempted = dict.fromkeys(PREEMPTED_BY, 0)  # by who stopped them, so far
        self.lost_workers = 0  # so far
        self._waiting: Counter[str] = Counter()  # by model
        self._by_row: dict[int, Job] = {}
        self._numbers: dict[int, str] = {}  # workers' names
        self._next_number = 0

    # What it says

    @property
    def waiting(self) -> int:
        return len(self.jobs) - self.running

    def waiting_for(self, model: str) -> int:
        return self._waiting[model]

    def phase(self, job: Job) -> RequestPhase:
        return RequestPhase(int(self.board.phase[job.row]))

    def home(self, job: Job) -> str:
        """The worker that has its tokens; empty for none."""
        return self._numbers.get(int(self.board.jobs.home[job.row]), "")

    def output(self, job: Job) -> int:
        return int(self.board.jobs.output[job.row])

    def held(self, job: Job) -> int:
        return int(self.board.jobs.held[job.row])

    def preemptions(self, job: Job) -> int:
        return int(self.board.jobs.preemptions[job.row])

    def job_of(self, row: int) -> Job | None:
        return self._by_row.get(row)

    def jobs_of(self, rows: Iterable[int]) -> Iterator[Job]:
        """Of those that are there."""
        return (self._by_row[row] for row in rows if row in self._by_row)

    def names(self, rows: Iterable[int]) -> tuple[str, ...]:
        return tuple(job.request_id for job in self.jobs_of(rows))

    def worker_of(self, number: int) -> WorkerJobs | None:
        return self.workers.get(self._numbers.get(number, ""))

    def seats(self) -> tuple[WorkerSnapshot, ...]:
        """The workers as a round sees them: not those that are leaving."""
        return tuple(
            WorkerSnapshot(
                worker.number,
                self.board.model(worker.view.model),
                worker.room_tokens,
                worker.view.block_tokens,
                worker.places,
                worker.view.reach_tokens,
                worker.cost,
                worker.shared_blocks,
                worker.prefixes.sorted,
            )
            for worker in self.workers.values()
            if not worker.leaving
        )

    def jobs_at(self, worker: WorkerJobs) -> list[Job]:
        """All that run there, or have their tokens there. O(rows)."""
        return list(self.jobs_of(self._rows_at(worker.number).tolist()))

    # What it does with requests

    def add(self, request: Request, link: str) -> Job:
        job = Job(request, link, self.board.add(request))
        self.jobs[request.request_id] = self._by_row[job.row] = job
        self._count_waiting(job, 1)
        if request.include_forecast:
            self.askers[job.request_id] = self.untold[job.request_id] = job
        return job

    def await_home(self, job: Job) -> None:
        """It stays out of the queue: a worker may come back with it."""
        self.board.phase[job.row] = RequestPhase.AWAITED

    def enqueue(self, job: Job) -> None:
        """It waits, since it arrived or since it last ran."""
        since_s = float(self.board.jobs.since_s[job.row])
        self.board.queue(job.row, job.request.arrival_s if since_s == inf else since_s)

    def is_leaving(self, job: Job, worker: WorkerJobs) -> bool:
        """It is to go there from a home that has not said yet that it stopped: it might end there
        meanwhile, and nobody would know. The report that says so calls for another round."""
        home = self.workers.get(self.home(job))
        return home is not None and home is not worker and job.request_id in home.pausing

    def admit(self, job: Job, worker: WorkerJobs, limit: int, now: float) -> bool:
        """Queued → running; whether its tokens must be sent there first."""
        jobs = self.board.jobs
        job.queued_s += now - float(jobs.since_s[job.row])
        stays = int(jobs.home[job.row]) == worker.number
        if not stays:
            self.moves += int(jobs.held[job.row]) > 0
            self.leave_home(job)
        self._run(job, worker, limit)
        worker.admitted += 1
        worker.draft.admit.append(Grant(job.request_id, limit))
        job.admitted_seq = worker.plan_seq + 1
        job.resumed_seq = job.admitted_seq if stays else 0
        worker.pausing.pop(job.request_id, None)
        return not stays

    def adopt(self, job: Job, worker: WorkerJobs, held: HeldRequest, now: float) -> None:
        """It is at that worker already, running or not, and stays there. Plans of an earlier
        stream are no measure of what it reports on this one."""
        jobs, row = self.board.jobs, job.row
        job.admitted_seq = job.resumed_seq = 0
        self.board.jobs.home[row] = worker.number
        self.progress([(job, _as_progress(held))], now)
        jobs.limit[row] = held.limit_tokens
        if held.running:
            self._run(job, worker, held.limit_tokens)
        else:
            self.board.queue(row, now)

    def _run(self, job: Job, worker: WorkerJobs, limit: int) -> None:
        self.board.admit(job.row, worker.number, limit)
        worker.running[job.request_id] = job
        self.running += 1
        self._count_waiting(job, -1)

    def _count_waiting(self, job: Job, more: int) -> None:
        model = job.request.model
        self._waiting[model] += more
        if not self._waiting[model]:
            del self._waiting[model]

    def extend(self, job: Job, worker: WorkerJobs, limit: int) -> None:
        self.board.jobs.limit[job.row] = limit
        worker.draft.extend.append(Grant(job.request_id, limit))

    def progress(self, told: Iterable[tuple[Job, RequestProgress]], now: float) -> None:
        """What workers have of these by their last word."""
        numbers = [(j.row, p.output_tokens, p.held_tokens, p.blocks) for j, p in told]
        if numbers:
            rows, output, held, blocks = np.array(numbers, np.int64).T
            self.board.advance(rows, output, held, blocks, now)

    def pause(self, job: Job, worker: WorkerJobs, residency: Residency, now: float) -> None:
        """Running → queued; KV that is to be kept goes where its worker's policy puts it."""
        worker.draft.pause.append(Pause(job.request_id, residency))
        worker.pausing[job.request_id] = worker.plan_seq + 1
        self._requeue(job, worker, now, "paused")

    def evict(self, job: Job, worker: WorkerJobs, now: float) -> None:
        """Running → queued: its worker let it go for want of memory."""
        self.board.jobs.evictions[job.row] += 1
        self.board.evictions += 1
        self._requeue(job, worker, now, "evicted")

    def _requeue(self, job: Job, worker: WorkerJobs, now: float, by: str) -> None:
        del worker.running[job.request_id]
        self.preempted[by] += 1
        self.running -= 1
        self._count_waiting(job, 1)
        self.board.jobs.preemptions[job.row] += 1
        self.board.queue(job.row, now)

    def take_paused(self, worker: WorkerJobs, applied_plan_seq: int) -> list[Job]:
        """Those of whom the worker has now said that they do not run any more."""
        if not worker.pausing:
            return []
        done = [name for name, seq in worker.pausing.items() if seq <= applied_plan_seq]
        for name in done:
            del worker.pausing[name]
        return [self.jobs[name] for name in done]

    def drop(self, job: Job) -> None:
        """Forget a request wherever it is; its worker is told to."""
        self._forget_at_home(job)
        self.end(job)

    def end(self, job: Job) -> None:
        """Forget a request wherever it is; its worker has done so."""
        home = self.workers.get(self.home(job))
        if home:
            home.pausing.pop(job.request_id, None)
        if home and home.running.pop(job.request_id, None):
            self.running -= 1
        else:
            self._count_waiting(job, -1)
        del self.jobs[job.request_id], self._by_row[job.row]
        if job.request.include_forecast:
            del self.askers[job.request_id]
            self.untold.pop(job.request_id, None)
        self.board.endings += 1
        self.board.remove(job.row)

    def leave_home(self, job: Job) -> None:
        """One that waits begins anew from its tokens, wherever it is placed."""
        self._forget_at_home(job)
        self.board.lose_home(np.array([job.row]))

    def _forget_at_home(self, job: Job) -> None:
        home = self.workers.get(self.home(job))
        if home:
            home.draft.forget(job.request_id)
            home.pausing.pop(job.request_id, None)

    # And with workers

    def attach(self, view: WorkerView, link: str) -> WorkerJobs:
        self._next_number += 1
        worker = WorkerJobs(view, link, self._next_number, UNMEASURED)
        worker.free_blocks = worker.kv_blocks
        self.workers[view.worker_id] = worker
        self._numbers[worker.number] = view.worker_id
        return worker

    def detach(self, worker_id: str, now: float) -> list[Job]:
        """Forget a worker; those who ran there, or had not been told to stop, are returned. All
        that was there waits, without KV."""
        worker = self.workers[worker_id]
        ran = list(worker.running.values())
        for job in ran:
            self._requeue(job, worker, now, "lost")
        self.lost_workers += 1
        self.board.lose_home(self._rows_at(worker.number))
        del self.workers[worker_id], self._numbers[worker.number]
        return ran + [self.jobs[name] for name in worker.pausing]

    def _rows_at(self, number: int) -> Ints:
        at = (self.board.jobs.home == number) & (self.board.phase != RequestPhase.FREE)
        return np.flatnonzero(at)

    def foresee(self, job: Job, forecast: Forecast) -> None:
        self.board.foresee(job.row, forecast)


def _as_progress(held: HeldRequest) -> RequestProgress:
    return RequestProgress(held.request_id, held.output_tokens, held.held_tokens, held.blocks)
