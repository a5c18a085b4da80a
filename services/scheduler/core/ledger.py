"""Live requests and attached workers: which phase each request is in, and where its tokens are.

The ledger is the only component that changes a request's phase. Each change checks the table of
legal transitions, is recorded as a `Transition`, and produces the message that the gateway needs.
Directives for workers collect in each worker's draft. The state and its rounds decide when and why.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, islice, repeat
from math import inf

import numpy as np

from services.core import (
    Grant,
    HeldRequest,
    Pause,
    Reject,
    Request,
    RequestProgress,
    Residency,
    WorkerView,
)
from services.costs import CostModel
from services.forecast import Ints
from services.policies.snapshot import NOWHERE, Bools, WorkerSnapshot
from services.scheduler.core.board import Board
from services.scheduler.core.events import Action, Refuse, message_about
from services.scheduler.core.jobs import Job, WorkerJobs
from services.scheduler.core.phases import RequestPhase, Transition, TransitionCause, require_legal

UNMEASURED = CostModel(base_s=0.01, prefill_token_s=1e-4, decode_seq_s=1e-4, context_token_s=0.0)
NO_ROW = -1  # of a request without a record here
_PHASES = tuple(RequestPhase)  # by value
NONE, RUNNING = RequestPhase.NONE, RequestPhase.RUNNING


class Ledger:
    """Owned by the state. `begin_step` sets the time of all changes until the next one; `actions`
    and `transitions` are those of the step so far."""

    def __init__(self, tenant_weights: Mapping[str, float] | None = None) -> None:
        self.board = Board(tenant_weights)
        self.jobs: dict[str, Job] = {}
        self.workers: dict[str, WorkerJobs] = {}
        self.with_forecast: dict[str, Job] = {}  # requests with include_forecast
        self.awaiting_promise: dict[str, Job] = {}  # of these, the ones that no round has timed yet
        self.running = 0
        self.moves = 0  # total admissions at another worker than the one with the request's KV
        self.lost_workers = self.displaced_workers = self.suspicions = 0  # totals
        self.now = 0.0
        self.actions: list[Action] = []
        self.transitions: list[Transition] = []
        self._waiting: Counter[str] = Counter()  # by model
        self._by_row: dict[int, Job] = {}
        self._worker_ids: dict[int, str] = {}  # by number
        self._next_number = 0

    def begin_step(self, now: float) -> None:
        self.now, self.actions, self.transitions = now, [], []

    # Queries

    @property
    def waiting(self) -> int:
        return len(self.jobs) - self.running

    def waiting_for(self, model: str) -> int:
        return self._waiting[model]

    def phase(self, job: Job) -> RequestPhase:
        return _PHASES[self.board.phase.item(job.row)]

    def home(self, job: Job) -> str:
        """The worker that has its tokens; empty if none."""
        return self._worker_ids.get(self.board.jobs.home.item(job.row), "")

    def output(self, job: Job) -> int:
        return int(self.board.jobs.output[job.row])

    def held(self, job: Job) -> int:
        return int(self.board.jobs.held[job.row])

    def preemptions(self, job: Job) -> int:
        return int(self.board.jobs.preemptions[job.row])

    def queued_s(self, job: Job) -> float:
        """Its time in the queue so far."""
        if self.phase(job) is RUNNING:
            return job.queued_s
        since_s = float(self.board.jobs.since_s[job.row])
        return job.queued_s + self.now - (since_s if since_s < inf else job.request.arrival_s)

    def jobs_at(self, rows: Iterable[int]) -> Iterator[Job]:
        """The live jobs of these rows."""
        return filter(None, map(self._by_row.get, rows))

    def names(self, rows: Ints) -> tuple[str, ...]:
        """The ids of the live requests of these rows."""
        return tuple(filter(None, self.board.names[rows].tolist()))

    def worker_numbered(self, number: int) -> WorkerJobs | None:
        return self.workers.get(self._worker_ids.get(number, ""))

    def worker_snapshots(self) -> tuple[WorkerSnapshot, ...]:
        """The workers that a round may use: not those that are draining or suspected."""
        return tuple(
            worker.snapshot(self.board.model_number(worker.view.model))
            for worker in self.workers.values()
            if worker.takes_requests
        )

    def jobs_with_home(self, worker: WorkerJobs) -> list[Job]:
        """The jobs that run there or have their tokens there. O(rows)."""
        return list(self.jobs_at(self._rows_with_home(worker.number).tolist()))

    def _rows_with_home(self, number: int) -> Ints:
        return np.flatnonzero((self.board.jobs.home == number) & (self.board.phase != NONE))

    # Changes of requests

    def add(self, request: Request, link: str) -> Job:
        job = Job(request, link, self.board.add(request))
        self.jobs[request.request_id] = self._by_row[job.row] = job
        if request.include_forecast:
            self.with_forecast[job.request_id] = self.awaiting_promise[job.request_id] = job
        self._move(job, RequestPhase.FORECASTING, TransitionCause.ARRIVED)
        return job

    def reject(self, request: Request, link: str, reject: Reject) -> None:
        """Refuses a request that has no record here."""
        cause, name = TransitionCause.REFUSED, request.request_id
        require_legal(name, NONE, NONE, cause)
        reason, message = reject.reason.value, reject.message
        self.transitions.append(
            Transition(name, NONE, NONE, cause, self.now, reason=reason, message=message)
        )
        self.actions.append(Refuse(link, name, reject))

    def refuse(self, job: Job, reject: Reject) -> None:
        """Refuses a request that was accepted before."""
        self.actions.append(Refuse(job.link, job.request_id, reject))
        self.drop(job, TransitionCause.REFUSED, reject.reason.value, reject.message)

    def await_worker(self, job: Job) -> None:
        """Keeps it out of the queue: the worker that its gateway names may attach again."""
        self._move(job, RequestPhase.AWAITING_WORKER, TransitionCause.AWAITED)

    def enqueue(self, job: Job, cause: TransitionCause = TransitionCause.ENQUEUED) -> None:
        """Queues a request for the first time here: it has waited since its arrival."""
        if (since_s := self.board.jobs.since_s)[job.row] == inf:
            since_s[job.row] = job.request.arrival_s
        self._move(job, RequestPhase.QUEUED, cause)

    def note(self, job: Job, cause: TransitionCause) -> None:
        """Records a cause that leaves the phase as it is, and sends its message to the gateway."""
        self._move(job, self.phase(job), cause)

    def stopping(self) -> dict[str, WorkerJobs]:
        """Paused requests that their workers have not confirmed yet to have stopped. They may still
        end there; the report that confirms the pause triggers another round."""
        return {name: worker for worker in self.workers.values() for name in worker.pausing}

    def admit(self, jobs: Sequence[Job], workers: Sequence[WorkerJobs],
              limits: Sequence[int]) -> None:  # fmt: skip
        """Queued → running, each at its worker; placed if its tokens must be sent there, else
        resumed. Each job once."""
        if not jobs:
            return
        columns, rows = self.board.jobs, _rows(jobs)
        stays = columns.home[rows] == [worker.number for worker in workers]
        self.moves += int(np.count_nonzero(columns.held[rows[~stays]]))
        self._leave_homes(jobs, rows, stays)
        waited_s, stay = (self.now - columns.since_s[rows]).tolist(), stays.tolist()
        each = zip(jobs, workers, limits, waited_s, stay, strict=True)
        for job, worker, limit, job_waited_s, stays_here in each:
            seq = worker.plan_seq + 1
            job.queued_s += job_waited_s
            job.admitted_seq, job.resumed_seq = seq, seq if stays_here else 0
            worker.admitted += 1
            worker.pausing.pop(job.request_id, None)
            worker.draft.admit.append(Grant(job.request_id, limit))
        causes = [TransitionCause.RESUMED if s else TransitionCause.PLACED for s in stay]
        self._run(jobs, rows, workers, limits, causes)

    def adopt(self, job: Job, worker: WorkerJobs, held: HeldRequest) -> None:
        """Leaves it at a worker that has it already. Sequence numbers of an earlier stream's plans
        do not apply to the reports of this one."""
        jobs, row = self.board.jobs, job.row
        job.admitted_seq = job.resumed_seq = 0
        jobs.home[row] = worker.number
        numbers = held.output_tokens, held.held_tokens, held.blocks
        self.progress([RequestProgress(job.request_id, *numbers)], worker.number)
        jobs.limit[row] = held.limit_tokens
        if held.running:
            causes = [TransitionCause.ADOPTED]
            self._run([job], np.array([row]), [worker], [held.limit_tokens], causes)
        else:
            jobs.since_s[row] = self.now
            self._move(job, RequestPhase.QUEUED, TransitionCause.ADOPTED)

    def _run(self, jobs: Sequence[Job], rows: Ints, workers: Sequence[WorkerJobs],
             limits: Sequence[int], causes: Sequence[TransitionCause]) -> None:  # fmt: skip
        self.board.admit(rows, [worker.number for worker in workers], limits)
        for job, worker in zip(jobs, workers, strict=True):
            worker.running[job.request_id] = job
        self._move_all(jobs, rows, RUNNING, causes)

    def extend(self, rows: Ints, limits: Ints) -> None:
        """Lets running requests run up to these limits. Rows of one worker are consecutive."""
        self.board.jobs.limit[rows] = limits
        pairs = zip(self.board.names[rows].tolist(), limits.tolist(), strict=True)
        grants = map(tuple.__new__, repeat(Grant), pairs)
        for home, here in groupby(self._homes(rows)):
            home.draft.extend += islice(grants, len(list(here)))

    def progress(self, progress: Sequence[RequestProgress], number: int) -> None:
        """Applies what a worker reports of the live jobs among these that have their home there.
        O(requests), below a microsecond each."""
        if not progress:
            return
        jobs = self.jobs
        names, *columns = zip(*progress, strict=True)
        known = [jobs.get(name) for name in names]
        rows = np.array([job.row if job else NO_ROW for job in known], np.int64)
        here = self.board.jobs.home[rows] == number
        here &= rows != NO_ROW
        numbers = np.array(columns, np.int64)
        if not here.all():
            rows, numbers = rows[here], numbers[:, here]
        output, held, blocks = numbers
        self.board.advance(rows, output, held, blocks, self.now)

    def pause(self, jobs: Sequence[Job], residency: Residency) -> None:
        """Running → queued. KV that the residency keeps stays at its worker. Each job once."""
        if not jobs:
            return
        for job, worker in zip(jobs, self._homes(_rows(jobs)), strict=True):
            worker.draft.pause.append(Pause(job.request_id, residency))
            worker.pausing[job.request_id] = worker.plan_seq + 1
        self._requeue(jobs, TransitionCause.PAUSED)

    def evict(self, job: Job) -> None:
        """Running → queued, because its worker ran out of memory."""
        self.board.jobs.evictions[job.row] += 1
        self.board.evictions += 1
        self._requeue([job], TransitionCause.EVICTED)

    def _requeue(self, jobs: Sequence[Job], cause: TransitionCause) -> None:
        rows = _rows(jobs)
        for job, worker in zip(jobs, self._homes(rows), strict=True):
            del worker.running[job.request_id]
        self.board.jobs.preemptions[rows] += 1
        self._move_all(jobs, rows, RequestPhase.QUEUED, [cause] * len(jobs))
        self.board.jobs.since_s[rows] = self.now

    def _homes(self, rows: Ints) -> list[WorkerJobs]:
        """The worker of each row, which has one."""
        homes = self.board.jobs.home[rows].tolist()
        return [self.workers[self._worker_ids[number]] for number in homes]

    def note_stopped(self, worker: WorkerJobs, applied_plan_seq: int) -> None:
        """Notes that the requests paused by plans up to the applied one have stopped."""
        if worker.pausing:
            for name in [n for n, seq in worker.pausing.items() if seq <= applied_plan_seq]:
                del worker.pausing[name]
                self.note(self.jobs[name], TransitionCause.STOPPED)

    def drop(self, job: Job, cause: TransitionCause, reason: str = "", message: str = "",
             output_tokens: int | None = None) -> None:  # fmt: skip
        """Ends a request wherever it is, and directs its worker to cancel it."""
        self._cancel_at_home(job)
        self.end(job, cause, reason, message, output_tokens)

    def end(self, job: Job, cause: TransitionCause, reason: str = "", message: str = "",
            output_tokens: int | None = None) -> None:  # fmt: skip
        """Ends a request wherever it is. Its worker has removed it, or has a cancel in its
        draft."""
        if home := self.workers.get(self.home(job)):
            home.pausing.pop(job.request_id, None)
            home.running.pop(job.request_id, None)
        self._move(job, NONE, cause, reason, message, output_tokens)
        del self.jobs[job.request_id], self._by_row[job.row]
        if job.request.include_forecast:
            del self.with_forecast[job.request_id]
            self.awaiting_promise.pop(job.request_id, None)
        self.board.endings += 1
        self.board.remove(job.row)

    def withdraw(self, jobs: Sequence[Job], worker: WorkerJobs) -> None:
        """Queues requests of a worker without its KV, also paused ones that it has not stopped."""
        self._requeue([j for j in jobs if j.request_id in worker.running], TransitionCause.LOST)
        for job in jobs:
            if worker.pausing.pop(job.request_id, None):
                self.note(job, TransitionCause.STOPPED)
        self.board.lose_home(_rows(jobs))

    def leave_home(self, job: Job) -> None:
        """Makes a queued request start from its tokens alone, wherever it is placed next."""
        self._cancel_at_home(job)
        self.board.lose_home(_rows([job]))

    def _leave_homes(self, jobs: Sequence[Job], rows: Ints, stays: Bools) -> None:
        """The same for those of many that do not stay."""
        homes = self.board.jobs.home[rows]
        for at in (~stays & (homes != NOWHERE)).nonzero()[0].tolist():
            self._cancel_at_home(jobs[at])
        self.board.lose_home(rows[~stays])

    def _cancel_at_home(self, job: Job) -> None:
        if home := self.workers.get(self.home(job)):
            home.draft.forget(job.request_id)
            home.pausing.pop(job.request_id, None)

    def _move(self, job: Job, after: RequestPhase, cause: TransitionCause, reason: str = "",
              message: str = "", output_tokens: int | None = None) -> None:  # fmt: skip
        """Changes its phase, records the change and sends its message to the gateway. The only
        writer of the phase column, with `_move_all`."""
        columns, row, name, before = self.board.jobs, job.row, job.request_id, self.phase(job)
        require_legal(name, before, after, cause)
        transition = Transition(
            name, before, after, cause, self.now,
            worker_id=self._worker_ids.get(columns.home.item(row), ""),
            output_tokens=columns.output.item(row) if output_tokens is None else output_tokens,
            held_tokens=columns.held.item(row),
            reason=reason,
            message=message,
            queued_s=job.queued_s if after is RUNNING else self.queued_s(job),
            preemptions=columns.preemptions.item(row),
        )  # fmt: skip
        if before is not after:
            self.running += (after is RUNNING) - (before is RUNNING)
            if change := _waits(after) - _waits(before):
                self._count_waiting(job.request.model, change)
        self.transitions.append(transition)
        worker = self.workers.get(transition.worker_id)
        if action := message_about(transition, job.link, worker.view.address if worker else ""):
            self.actions.append(action)
        self.board.phase[row] = after

    def _move_all(self, jobs: Sequence[Job], rows: Ints, after: RequestPhase,
                  causes: Sequence[TransitionCause]) -> None:  # fmt: skip
        """The same for many, each once, in this order, that begin or cease to run at their home
        worker. By columns: a round may pause as many requests as run."""
        columns, phase = self.board.jobs, self.board.phase
        views = [home.view for home in self._homes(rows)]
        before = [_PHASES[each] for each in phase[rows].tolist()]
        names = [job.request_id for job in jobs]
        for name, was, cause in {
            (was, cause): (name, was, cause)
            for name, was, cause in zip(names, before, causes, strict=True)
        }.values():
            require_legal(name, was, after, cause)
        numbers = (columns.output, columns.held, columns.preemptions)
        output, held, preemptions = (column[rows].tolist() for column in numbers)
        fields = zip(
            names, before, repeat(after), causes, repeat(self.now), [v.worker_id for v in views],
            output, held, repeat(""), repeat(""), [job.queued_s for job in jobs], preemptions,
            strict=False,
        )  # fmt: skip
        made = list(map(tuple.__new__, repeat(Transition), fields))
        self.transitions += made
        began = after is RUNNING
        self.running += len(jobs) if began else -len(jobs)
        for model, count in Counter([job.request.model for job in jobs]).items():
            self._count_waiting(model, -count if began else count)
        links, addresses = (job.link for job in jobs), (view.address for view in views)
        self.actions += filter(None, map(message_about, made, links, addresses))
        phase[rows] = after

    def _count_waiting(self, model: str, change: int) -> None:
        self._waiting[model] += change
        if not self._waiting[model]:
            del self._waiting[model]

    # Changes of workers

    def attach(self, view: WorkerView, link: str) -> WorkerJobs:
        self._next_number += 1
        worker = WorkerJobs(view, link, self._next_number, UNMEASURED)
        worker.free_blocks = worker.kv_blocks
        self.workers[view.worker_id] = worker
        self._worker_ids[worker.number] = view.worker_id
        return worker

    def detach(self, worker_id: str) -> None:
        """Forgets a worker. Its requests wait without KV."""
        worker = self.workers[worker_id]
        self.withdraw(self.jobs_with_home(worker), worker)
        self.lost_workers += 1
        del self.workers[worker_id], self._worker_ids[worker.number]


def _rows(jobs: Sequence[Job]) -> Ints:
    return np.array([job.row for job in jobs], np.int64)


def _waits(phase: RequestPhase) -> bool:
    return phase is not NONE and phase is not RUNNING
