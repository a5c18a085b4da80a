"""Where every live request is: being forecast, queued, or running at a worker — in one place only.

The ledger moves requests and notes what their workers must be told (each worker's draft). Why
and when they move is the state's affair.
"""

from dataclasses import dataclass, replace
from heapq import heappop, heappush
from math import inf

from services.core import (
    CostModel,
    Grant,
    Pause,
    Plan,
    Reject,
    RejectReason,
    Request,
    Residency,
    WorkerView,
)
from services.forecast import Forecast, certain
from services.scheduler.drain import drain_s
from services.scheduler.events import Fleet, SendPlan, WorkerStatus
from services.scheduler.jobs import Draft, Job, Phase, WorkerJobs
from services.scheduler.presets import Preset
from services.scheduler.queue import JobQueue
from services.scheduler.ranking import UNMEASURED, Ranking
from services.scheduler.victims import VICTIMS


@dataclass(frozen=True)
class Limits:
    """Bounds of what the scheduler keeps and offers."""

    max_queue: int = 4_096
    offer_window: int = 1_024  # how much of the queue one round looks at


class Ledger:
    """Live jobs, the queue and the workers. Owned by the state, changed by nobody else."""

    def __init__(self, preset: Preset, limits: Limits):
        self.preset = preset
        self.limits = limits
        self.jobs: dict[str, Job] = {}
        self.workers: dict[str, WorkerJobs] = {}
        self.ranking = Ranking(preset.ordered())
        self._costs_changed = False
        self._serial = 0
        self._deadlines: list[tuple[float, int, str]] = []

    # What it says

    @property
    def queue(self) -> JobQueue:
        return self.ranking.queue

    def refusal(self, request: Request) -> Reject | None:
        """Why this request can't be taken, if so."""
        if request.request_id in self.jobs:
            return Reject(RejectReason.DUPLICATE, f"request id {request.request_id} is in use")
        running = sum(len(worker.running) for worker in self.workers.values())
        if len(self.jobs) - running < self.limits.max_queue:
            return self.too_long(request)
        wait_s = drain_s(self.queue, self.workers.values())
        most = self.limits.max_queue
        message = f"{most} requests are waiting; try again in {wait_s:.0f} s"
        return Reject(RejectReason.QUEUE_FULL, message, wait_s)

    def too_long(self, request: Request) -> Reject | None:
        """No worker there is could ever hold it. While none is there, one may come that can."""
        reach = [w.view.reach_tokens for w in self.workers.values()]
        total = request.prompt_tokens + request.max_tokens
        if not reach or total <= max(reach):
            return None
        return Reject(
            RejectReason.TOO_LONG,
            f"prompt ({request.prompt_tokens}) + max_tokens ({request.max_tokens}) = {total} "
            f"tokens, but the longest request that fits here is {max(reach)} tokens",
        )

    def next_deadline(self) -> float:
        """When time alone changes something: a deadline passes or a waiting job moves up."""
        return min(self._next_end_s(), self.ranking.next_promotion_s())

    def _next_end_s(self) -> float:
        while self._deadlines and not self._is_current(*self._deadlines[0][1:]):
            heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else inf

    def _is_current(self, serial: int, request_id: str) -> bool:
        job = self.jobs.get(request_id)
        return job is not None and job.serial == serial

    def overdue(self, now: float) -> list[Job]:
        """Jobs whose deadline has come; the caller drops them."""
        due = []
        while self._next_end_s() <= now:
            due.append(self.jobs[heappop(self._deadlines)[2]])
        return due

    def fleet(self) -> Fleet:
        workers = tuple(
            WorkerStatus(w.view, len(w.running), w.held_tokens) for w in self.workers.values()
        )
        drain = drain_s(self.queue, self.workers.values())
        return Fleet(workers, len(self.queue), drain, self.preset.name)

    # What it does with requests

    def add(self, request: Request, link: str, now: float) -> Job:
        """A new job, whose forecast is still to come."""
        self._serial += 1
        job = Job(request, link, self._serial, certain(request.max_tokens))
        job.output_tokens = request.delivered_tokens
        job.queued_since_s = now
        self.jobs[request.request_id] = job
        if request.deadline_s < inf:
            heappush(self._deadlines, (request.deadline_s, job.serial, request.request_id))
        return job

    def enqueue(self, job: Job, forecast: Forecast, now: float) -> None:
        """Its forecast is there: it waits to be admitted."""
        job.forecast = forecast
        job.phase = Phase.QUEUED
        self.ranking.begin(job, now)

    def admit(self, job: Job, worker_id: str, now: float) -> bool:
        """Queued → running there; whether its tokens must be sent there first."""
        worker = self.workers[worker_id]
        self.ranking.take(job)
        job.phase = Phase.RUNNING
        job.queued_s += now - job.queued_since_s
        job.limit_tokens = self._limit(job)
        worker.running[job.request_id] = job
        worker.draft.admit.append(Grant(job.request_id, job.limit_tokens))
        if job.home == worker_id:
            job.resumed_seq = worker.plan_seq + 1
            worker.pausing.pop(job.request_id, None)
            return False
        self._forget_at_home(job)
        job.home = worker_id
        job.resumed_seq = 0
        return True

    def progress(self, worker: WorkerJobs, job: Job, output_tokens: int, held_tokens: int) -> None:
        """Note what it has; a slice about to run out is followed by the next in good time, so
        that planning never stalls the device."""
        self.note(job, output_tokens, held_tokens)
        limit = self._limit(job)
        left = job.limit_tokens - job.output_tokens
        runs = job.phase is Phase.RUNNING
        if runs and limit > job.limit_tokens and left <= self.preset.slice_tokens // 2:
            job.limit_tokens = limit
            worker.draft.extend.append(Grant(job.request_id, limit))

    def note(self, job: Job, output_tokens: int, held_tokens: int) -> None:
        """What it has by its worker's last word; that never takes tokens back."""
        job.output_tokens = max(job.output_tokens, output_tokens)
        job.held_tokens = held_tokens
        self.ranking.renew(job)

    def _limit(self, job: Job) -> int:
        """A slice beyond what is there, or all that was asked for (ALGORITHMS 4)."""
        slice_tokens = self.preset.slice_tokens or job.request.max_tokens
        return min(job.request.max_tokens, job.output_tokens + slice_tokens)

    def pause(self, job: Job, now: float) -> None:
        """Running → queued, its KV kept where its worker's residency policy puts it."""
        worker = self.workers[job.home]
        worker.draft.pause.append(Pause(job.request_id, Residency.KEEP))
        worker.pausing[job.request_id] = worker.plan_seq + 1
        self._requeue(job, now)

    def evict(self, job: Job, output_tokens: int, held_tokens: int, now: float) -> None:
        """Running → queued: its worker ran out of memory; so much of its KV rests there."""
        job.output_tokens = max(job.output_tokens, output_tokens)
        job.held_tokens = held_tokens
        self._requeue(job, now)

    def _requeue(self, job: Job, now: float) -> None:
        del self.workers[job.home].running[job.request_id]
        job.phase = Phase.QUEUED
        job.preemptions += 1
        job.queued_since_s = now
        self.ranking.wait(job, now)

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
        self.end(job)
        self._forget_at_home(job)

    def end(self, job: Job) -> None:
        """Forget a request wherever it is; its worker has done so."""
        del self.jobs[job.request_id]
        if job.phase is Phase.QUEUED:
            self.ranking.take(job)
        if job.home in self.workers:
            home = self.workers[job.home]
            home.running.pop(job.request_id, None)
            home.pausing.pop(job.request_id, None)
        job.phase = Phase.ENDED

    def _forget_at_home(self, job: Job) -> None:
        if job.home in self.workers:
            home = self.workers[job.home]
            home.draft.forget(job.request_id)
            home.pausing.pop(job.request_id, None)

    # And with workers

    def attach(self, view: WorkerView, link: str) -> None:
        self.workers[view.worker_id] = WorkerJobs(view, link, UNMEASURED)
        self._costs_changed = True

    def cost(self, worker_id: str, cost: CostModel) -> None:
        self.workers[worker_id].cost = cost
        self._costs_changed = True

    def keep_pace(self) -> None:
        """Rank by how fast the fleet is by now."""
        self.ranking.keep_pace(self.workers.values(), self.jobs.values(), self._costs_changed)
        self._costs_changed = False

    def detach(self, worker_id: str, now: float) -> list[Job]:
        """Forget a worker; those who ran there, or had not been told to stop, are returned. All
        that was there waits, without KV."""
        worker = self.workers[worker_id]
        ran = list(worker.running.values())
        for job in ran:
            self.evict(job, 0, 0, now)
        del self.workers[worker_id]
        for job in self.jobs.values():
            if job.home == worker_id:
                job.home = ""
                self.note(job, job.output_tokens, 0)
        return ran + [self.jobs[name] for name in worker.pausing]

    def take_plans(self, now: float) -> list[SendPlan]:
        """One plan for every worker whose directives have changed since the last call."""
        return [
            SendPlan(worker_id, worker.link, self._plan(worker_id, worker, now))
            for worker_id, worker in self.workers.items()
            if worker.draft
        ]

    def _plan(self, worker_id: str, worker: WorkerJobs, now: float) -> Plan:
        draft, worker.draft = worker.draft, Draft()
        worker.plan_seq += 1
        plan = Plan(
            seq=worker.plan_seq,
            admit=tuple(draft.admit),
            extend=tuple(draft.extend),
            pause=tuple(draft.pause),
            cancel=tuple(draft.cancel),
            victims=tuple(VICTIMS[self.preset.victim](worker.running.values())),
        )
        if not self.preset.keeps_kv:
            return plan
        return replace(
            plan,
            order=self.ranking.standings(worker_id, self.workers, now),
            residency=self.preset.residency,
            costs=worker.cost.kv_costs,
        )
