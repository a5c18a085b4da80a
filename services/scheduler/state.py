"""The scheduler's core: `step(event, now) → actions`, no clock and no I/O.

The loop a round follows: an event changes jobs → when something may now run, the queue's head is
dealt to workers and the batcher asked (AskBatch) → its answer (Formed) admits → every worker whose
directives changed gets one plan. One round is under way at a time; what happens meanwhile marks
the state dirty and starts the next.
"""

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

from services.core import (
    Completion,
    CostModel,
    FinishReason,
    Grant,
    Outcome,
    Plan,
    Progress,
    Reject,
    RejectReason,
    Request,
)
from services.forecast import certain
from services.scheduler import events as ev
from services.scheduler.drain import drain_s
from services.scheduler.jobs import Draft, Job, Phase, WorkerJobs
from services.scheduler.order import ORDERS
from services.scheduler.placement import PLACEMENTS
from services.scheduler.presets import Preset
from services.scheduler.problem import pose
from services.scheduler.queue import JobQueue
from services.scheduler.victims import VICTIMS

UNMEASURED = CostModel(base_s=0.01, prefill_token_s=1e-4, decode_seq_s=1e-4, context_token_s=0.0)
LEARNT_FROM = (FinishReason.STOP, FinishReason.LENGTH)


@dataclass(frozen=True)
class Limits:
    """Bounds of what the scheduler keeps and offers."""

    max_queue: int = 4_096
    offer_window: int = 1_024  # how much of the queue one round looks at


class SchedulerState:
    """All the scheduler knows. Mutated by `step` alone; the same events give the same actions."""

    def __init__(self, preset: Preset, limits: Limits = Limits()):
        self.preset = preset
        self.limits = limits
        self.jobs: dict[str, Job] = {}
        self.workers: dict[str, WorkerJobs] = {}
        self.queue = JobQueue(ORDERS[preset.order])
        self._serial = 0
        self._deadlines: list[tuple[float, int, str]] = []
        self._draining = False
        self._round = 0
        self._offered: dict[str, list[Job]] | None = None  # of the round under way
        self._dirty = False
        self._actions: list[ev.Action] = []
        self._handlers: dict[str, Callable[..., None]] = {
            "submitted": self._submitted,
            "forecasted": self._forecasted,
            "refreshed": self._refreshed,
            "cancelled": self._cancelled,
            "gateway_lost": self._gateway_lost,
            "worker_attached": self._worker_attached,
            "worker_lost": self._worker_lost,
            "reported": self._reported,
            "costed": self._costed,
            "formed": self._formed,
            "draining": self._drain,
            "tick": self._tick,
        }

    def step(self, event: ev.Event, now: float) -> list[ev.Action]:
        """Take one event at time `now` (never falling); returns what is to be done, in order."""
        self._handlers[event.kind](event, now)
        self._expire(now)
        self._start_round()
        self._send_plans()
        actions, self._actions = self._actions, []
        return actions

    def next_deadline(self) -> float:
        """When a Tick is due; infinite when nothing waits for time."""
        while self._deadlines and self._deadlines[0][2] not in self.jobs:
            heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else inf

    def fleet(self) -> ev.Fleet:
        workers = tuple(
            ev.WorkerStatus(w.view, len(w.running), w.held_tokens) for w in self.workers.values()
        )
        drain = drain_s(self.queue, self.workers.values())
        return ev.Fleet(workers, len(self.queue), drain, self.preset.name)

    def shared_representatives(self) -> list[Request]:
        """One live request for each population forecast in use."""
        return list({j.forecast.shared_key: j.request for j in self.jobs.values()
                     if j.forecast.shared_key}.values())  # fmt: skip

    # Requests come and go

    def _submitted(self, event: ev.Submitted, now: float) -> None:
        request = event.request
        known = self.jobs.get(request.request_id)
        if known and known.link != event.link:  # resubmitted on a new stream before the old fell
            self._drop(known)
            known = None
        reject = self._refusal(request, known)
        if reject:
            self._actions.append(ev.Refuse(event.link, request.request_id, reject))
            return
        self._serial += 1
        job = Job(request, event.link, self._serial, certain(request.max_tokens))
        job.output_tokens = request.delivered_tokens
        job.queued_since_s = now
        self.jobs[request.request_id] = job
        if request.deadline_s < inf:
            heappush(self._deadlines, (request.deadline_s, job.serial, request.request_id))
        self._actions.append(ev.AskForecast((request,)))

    def _refusal(self, request: Request, known: Job | None) -> Reject | None:
        if known:
            return Reject(RejectReason.DUPLICATE, f"request id {request.request_id} is in use")
        if self._draining:
            return Reject(RejectReason.DRAINING, "the scheduler is shutting down", 1.0)
        if len(self.jobs) - self._running_count() >= self.limits.max_queue:
            wait_s = self.fleet().drain_s
            return Reject(
                RejectReason.QUEUE_FULL,
                f"{self.limits.max_queue} requests are waiting; try again in {wait_s:.0f} s",
                wait_s,
            )
        return self._too_long(request)

    def _too_long(self, request: Request) -> Reject | None:
        reach = [w.view.reach_tokens for w in self.workers.values()]
        total = request.prompt_tokens + request.max_tokens
        if not reach or total <= max(reach):
            return None
        return Reject(
            RejectReason.TOO_LONG,
            f"prompt ({request.prompt_tokens}) + max_tokens ({request.max_tokens}) = {total} "
            f"tokens, but the longest request that fits here is {max(reach)} tokens",
        )

    def _running_count(self) -> int:
        return sum(len(worker.running) for worker in self.workers.values())

    def _forecasted(self, event: ev.Forecasted, now: float) -> None:
        for request_id, forecast in event.forecasts:
            job = self.jobs.get(request_id)
            if job and job.phase is Phase.FORECASTING:
                job.forecast = forecast
                job.phase = Phase.QUEUED
                self.queue.push(job)
                self._dirty = True

    def _refreshed(self, event: ev.Refreshed, now: float) -> None:
        fresh = {forecast.shared_key: forecast for forecast in event.forecasts}
        for job in self.jobs.values():
            forecast = fresh.get(job.forecast.shared_key)
            if forecast and job.forecast.shared_key:
                job.forecast = forecast
        self._dirty |= bool(self.queue)

    def _cancelled(self, event: ev.Cancelled, now: float) -> None:
        job = self.jobs.get(event.request_id)
        if job and job.link == event.link:
            job.output_tokens = event.output_tokens
            self._learn(job, event.reason, now)
            self._drop(job)

    def _gateway_lost(self, event: ev.GatewayLost, now: float) -> None:
        for job in [job for job in self.jobs.values() if job.link == event.link]:
            self._drop(job)

    def _drop(self, job: Job) -> None:
        """Forget a request everywhere; its worker is told to."""
        del self.jobs[job.request_id]
        self._withdraw(job)
        if job.home in self.workers:
            self.workers[job.home].draft.cancel.append(job.request_id)

    def _withdraw(self, job: Job) -> None:
        if job.phase is Phase.QUEUED:
            self.queue.remove(job)
        if job.phase is Phase.RUNNING:
            del self.workers[job.home].running[job.request_id]
        self._dirty = True

    def _expire(self, now: float) -> None:
        while self.next_deadline() <= now:
            job = self.jobs[heappop(self._deadlines)[2]]
            self._finish(job, FinishReason.DEADLINE, now, "the deadline passed")
            self._drop(job)

    def _finish(self, job: Job, reason: FinishReason, now: float, message: str = "") -> None:
        waiting_s = now - job.queued_since_s if job.phase is not Phase.RUNNING else 0.0
        self._actions.append(
            ev.Finish(
                job.link,
                job.request_id,
                reason,
                job.output_tokens,
                job.preemptions,
                job.queued_s + waiting_s,
                message,
            )
        )

    def _learn(self, job: Job, reason: FinishReason, now: float) -> None:
        if reason in LEARNT_FROM:
            request = job.request
            outcome = Outcome(
                request.request_id,
                request.model,
                request.application,
                request.prompt_tokens,
                job.output_tokens,
                request.max_tokens,
                reason,
                now - request.arrival_s,
                job.preemptions,
            )
            self._actions.append(ev.Learn(outcome))

    def _drain(self, event: ev.Draining, now: float) -> None:
        self._draining = True

    def _tick(self, event: ev.Tick, now: float) -> None:
        """Nothing but time passed; every step looks at deadlines."""

    # Workers come, report and go

    def _worker_attached(self, event: ev.WorkerAttached, now: float) -> None:
        worker_id = event.view.worker_id
        if worker_id in self.workers:
            self._lose(worker_id, now)
        self.workers[worker_id] = WorkerJobs(event.view, event.link, UNMEASURED)
        for job in [job for job in self.jobs.values() if job.phase is not Phase.RUNNING]:
            reject = self._too_long(job.request)
            if reject:
                self._actions.append(ev.Refuse(job.link, job.request_id, reject))
                self._drop(job)
        self._dirty = True

    def _worker_lost(self, event: ev.WorkerLost, now: float) -> None:
        worker = self.workers.get(event.worker_id)
        if worker and worker.link == event.link:
            self._lose(event.worker_id, now)

    def _lose(self, worker_id: str, now: float) -> None:
        worker = self.workers.pop(worker_id)
        for job in worker.running.values():
            self._requeue(job, job.output_tokens, now)
        for job in self.jobs.values():
            if job.home == worker_id:
                job.home = ""
        self._dirty = True

    def _requeue(self, job: Job, output_tokens: int, now: float) -> None:
        job.phase = Phase.QUEUED
        job.output_tokens = output_tokens
        job.held_tokens = 0
        job.preemptions += 1
        job.queued_since_s = now
        self.queue.push(job)
        self._actions.append(ev.Preempt(job.link, job.request_id, output_tokens))

    def _costed(self, event: ev.Costed, now: float) -> None:
        if event.worker_id in self.workers:
            self.workers[event.worker_id].cost = event.cost

    def _reported(self, event: ev.Reported, now: float) -> None:
        worker = self.workers.get(event.worker_id)
        report = event.report
        if not worker or worker.link != event.link or report.seq <= worker.report_seq:
            return
        worker.report_seq = report.seq
        for progress in report.progress:
            self._progressed(worker, progress)
        for completion in report.finished:
            self._completed(worker, completion, now)
        for progress in report.evicted:
            job = worker.running.pop(progress.request_id, None)
            if job:
                self._requeue(job, progress.output_tokens, now)
        self._dirty = True

    def _progressed(self, worker: WorkerJobs, progress: Progress) -> None:
        job = worker.running.get(progress.request_id)
        if job is None:
            return
        job.output_tokens = progress.output_tokens
        job.held_tokens = progress.held_tokens
        limit = self._limit(job)
        if job.limit_tokens - job.output_tokens <= self.preset.slice_tokens // 2 < limit:
            self._extend(worker, job, limit)

    def _extend(self, worker: WorkerJobs, job: Job, limit: int) -> None:
        if limit > job.limit_tokens:
            job.limit_tokens = limit
            worker.draft.extend.append(Grant(job.request_id, limit))

    def _limit(self, job: Job) -> int:
        """A slice beyond what is there, or all that was asked for (ALGORITHMS 4)."""
        slice_tokens = self.preset.slice_tokens or job.request.max_tokens
        return min(job.request.max_tokens, job.output_tokens + slice_tokens)

    def _completed(self, worker: WorkerJobs, completion: Completion, now: float) -> None:
        job = worker.running.pop(completion.request_id, None)
        if job:
            del self.jobs[job.request_id]
            job.output_tokens = completion.output_tokens
            self._learn(job, completion.reason, now)
            self._finish(job, completion.reason, now)

    # A planning round

    def _start_round(self) -> None:
        if not (self._dirty and self._offered is None and self.queue and self.workers):
            return
        self._dirty = False
        head = self.queue.head(self.limits.offer_window)
        offers = PLACEMENTS[self.preset.placement](head, self.workers)
        offers = {name: jobs for name, jobs in offers.items() if jobs}
        if offers:
            self._round += 1
            self._offered = offers
            self._actions.append(pose(self._round, self.preset, self.workers, offers))

    def _formed(self, event: ev.Formed, now: float) -> None:
        if event.round != self._round or self._offered is None:
            return
        offered, self._offered = self._offered, None
        for batch in event.batches:
            worker = self.workers.get(batch.worker_id)
            for job in offered.get(batch.worker_id, [])[: batch.admit] if worker else []:
                if job.phase is Phase.QUEUED and self.jobs.get(job.request_id) is job:
                    self._admit(job, batch.worker_id, now)
        self._dirty |= not event.batches

    def _admit(self, job: Job, worker_id: str, now: float) -> None:
        worker = self.workers[worker_id]
        self.queue.remove(job)
        job.phase = Phase.RUNNING
        job.queued_s += now - job.queued_since_s
        job.limit_tokens = self._limit(job)
        worker.running[job.request_id] = job
        worker.draft.admit.append(Grant(job.request_id, job.limit_tokens))
        if job.home != worker_id:
            self._move(job, worker_id)

    def _move(self, job: Job, worker_id: str) -> None:
        if job.home in self.workers:
            self.workers[job.home].draft.cancel.append(job.request_id)
        job.home = worker_id
        address = self.workers[worker_id].view.address
        place = ev.Place(job.link, job.request_id, worker_id, address, job.queued_s)
        self._actions.append(place)

    def _send_plans(self) -> None:
        for worker_id, worker in self.workers.items():
            if not worker.draft:
                continue
            draft, worker.draft = worker.draft, Draft()
            worker.plan_seq += 1
            plan = Plan(
                seq=worker.plan_seq,
                admit=tuple(draft.admit),
                extend=tuple(draft.extend),
                cancel=tuple(draft.cancel),
                victims=tuple(VICTIMS[self.preset.victim](worker.running.values())),
            )
            self._actions.append(ev.SendPlan(worker_id, worker.link, plan))
