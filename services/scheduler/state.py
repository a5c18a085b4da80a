"""The scheduler's core: `step(event, now) → actions`, no clock and no I/O.

The loop a round follows: an event changes jobs → when something may now run, the queue's head is
dealt to workers, the running that would make way for it stand in line with it, and the batcher is
asked (AskBatch) → its answer (Formed) admits and pauses → every worker whose directives changed
gets one plan. One round is under way at a time; what happens meanwhile marks the state dirty and
starts the next.
"""

from collections.abc import Callable

from services.core import (
    Completion,
    FinishReason,
    Outcome,
    Progress,
    Reject,
    RejectReason,
    Report,
    Request,
)
from services.scheduler import events as ev
from services.scheduler.contest import Contest, renewed, settle
from services.scheduler.dealing import deal
from services.scheduler.jobs import Job, Phase, WorkerJobs
from services.scheduler.ledger import Ledger, Limits
from services.scheduler.presets import Preset
from services.scheduler.problem import pose

DEFAULT_LIMITS = Limits()
LEARNT_FROM = (FinishReason.STOP, FinishReason.LENGTH)
DRAINING = Reject(RejectReason.DRAINING, "the scheduler is shutting down", 1.0)


class SchedulerState:
    """All the scheduler knows. Mutated by `step` alone; the same events give the same actions."""

    def __init__(self, preset: Preset, limits: Limits = DEFAULT_LIMITS):
        self.preset = preset
        self.limits = limits
        self.ledger = Ledger(preset, limits)
        self._draining = False
        self._dirty = False
        self._round = 0
        self._contests: dict[str, Contest] | None = None  # of the round under way, by worker
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
        self.ledger.keep_pace()
        self._dirty |= self.ledger.ranking.promote(now)
        self._start_round()
        self._actions += self.ledger.take_plans(now)
        actions, self._actions = self._actions, []
        return actions

    @property
    def jobs(self) -> dict[str, Job]:
        return self.ledger.jobs

    @property
    def workers(self) -> dict[str, WorkerJobs]:
        return self.ledger.workers

    def next_deadline(self) -> float:
        """When a Tick is due; infinite when nothing waits for time."""
        return self.ledger.next_deadline()

    def shared_representatives(self) -> list[Request]:
        """One live request for each population forecast in use."""
        shared = {job.forecast.shared_key: job.request for job in self.jobs.values()}
        shared.pop("", None)
        return list(shared.values())

    # Requests come and go

    def _submitted(self, event: ev.Submitted, now: float) -> None:
        request = event.request
        known = self.jobs.get(request.request_id)
        if known and known.link != event.link:  # resubmitted on a new stream before the old fell
            self._drop(known)
        reject = DRAINING if self._draining else self.ledger.refusal(request)
        if reject:
            self._actions.append(ev.Refuse(event.link, request.request_id, reject))
        else:
            self.ledger.add(request, event.link, now)
            self._actions.append(ev.AskForecast((request,)))

    def _forecasted(self, event: ev.Forecasted, now: float) -> None:
        for request_id, forecast in event.forecasts:
            job = self.jobs.get(request_id)
            if job and job.phase is Phase.FORECASTING:
                self.ledger.enqueue(job, forecast, now)
                self._dirty = True

    def _refreshed(self, event: ev.Refreshed, now: float) -> None:
        fresh = {f.shared_key: f for f in event.forecasts if f.shared_key}
        for job in self.jobs.values():
            job.forecast = fresh.get(job.forecast.shared_key, job.forecast)
        self._dirty = True

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
        self.ledger.drop(job)
        self._dirty = True

    def _expire(self, now: float) -> None:
        for job in self.ledger.overdue(now):
            self._finish(job, FinishReason.DEADLINE, now, "the deadline passed")
            self._drop(job)

    def _finish(self, job: Job, reason: FinishReason, now: float, message: str = "") -> None:
        waiting_s = now - job.queued_since_s if job.phase is not Phase.RUNNING else 0.0
        finish = ev.Finish(
            job.link,
            job.request_id,
            reason,
            job.output_tokens,
            job.preemptions,
            job.queued_s + waiting_s,
            message,
        )
        self._actions.append(finish)

    def _learn(self, job: Job, reason: FinishReason, now: float) -> None:
        if reason not in LEARNT_FROM:
            return
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
        """Nothing but time passed; every step looks at deadlines and ageing."""

    # Workers come, report and go

    def _worker_attached(self, event: ev.WorkerAttached, now: float) -> None:
        if event.view.worker_id in self.workers:
            self._lose(event.view.worker_id, now)
        self.ledger.attach(event.view, event.link)
        for job in [job for job in self.jobs.values() if job.phase is not Phase.RUNNING]:
            reject = self.ledger.too_long(job.request)
            if reject:
                self._actions.append(ev.Refuse(job.link, job.request_id, reject))
                self._drop(job)
        self._dirty = True

    def _worker_lost(self, event: ev.WorkerLost, now: float) -> None:
        worker = self.workers.get(event.worker_id)
        if worker and worker.link == event.link:
            self._lose(event.worker_id, now)

    def _lose(self, worker_id: str, now: float) -> None:
        for job in self.ledger.detach(worker_id, now):
            self._tell_preempted(job)
        self._dirty = True

    def _tell_preempted(self, job: Job) -> None:
        self._actions.append(ev.Preempt(job.link, job.request_id, job.output_tokens))

    def _costed(self, event: ev.Costed, now: float) -> None:
        if event.worker_id in self.workers:
            self.ledger.cost(event.worker_id, event.cost)

    def _reported(self, event: ev.Reported, now: float) -> None:
        worker = self.workers.get(event.worker_id)
        report = event.report
        if not worker or worker.link != event.link or report.seq <= worker.report_seq:
            return
        worker.report_seq = report.seq
        for told in report.progress:
            if job := self._here(told.request_id, event.worker_id):
                self.ledger.progress(worker, job, told.output_tokens, told.held_tokens)
        for completion in report.finished:
            if job := self._here(completion.request_id, event.worker_id):
                self._completed(job, completion, now)
        for told in report.evicted:
            if job := self._here(told.request_id, event.worker_id):
                self._evicted(job, told, report, now)
        for job in self.ledger.take_paused(worker, report.applied_plan_seq):
            self._tell_preempted(job)
        self._dirty = True

    def _here(self, request_id: str, worker_id: str) -> Job | None:
        """A job that runs there, or was paused or evicted there."""
        job = self.jobs.get(request_id)
        return job if job and job.home == worker_id else None

    def _evicted(self, job: Job, told: Progress, report: Report, now: float) -> None:
        """Unless it was paused before, and runs again by a plan that came after."""
        if job.phase is Phase.RUNNING and report.applied_plan_seq >= job.resumed_seq:
            self.ledger.evict(job, told.output_tokens, told.held_tokens, now)
            self._tell_preempted(job)
            return
        self.ledger.note(job, told.output_tokens, told.held_tokens)
        if self.workers[job.home].pausing.pop(job.request_id, None):
            self._tell_preempted(job)  # it stopped before it read that it should

    def _completed(self, job: Job, completion: Completion, now: float) -> None:
        job.output_tokens = completion.output_tokens
        self._learn(job, completion.reason, now)
        self._finish(job, completion.reason, now)
        self.ledger.end(job)

    # A planning round

    def _start_round(self) -> None:
        if not (self._dirty and self._contests is None and self.ledger.queue and self.workers):
            return
        self._dirty = False
        head = self.ledger.queue.head(self.limits.offer_window)
        contests = deal(self.preset, head, self.ledger.queue, self.workers)
        if contests:
            self._ask(contests)

    def _ask(self, contests: dict[str, Contest]) -> None:
        self._round += 1
        self._contests = contests
        self._actions.append(pose(self._round, self.preset, self.workers, contests))

    def _formed(self, event: ev.Formed, now: float) -> None:
        if event.round != self._round or self._contests is None:
            return
        contests, self._contests = self._contests, None
        again = {}
        for batch in event.batches:
            contest = self._still_held(batch.worker_id, contests.get(batch.worker_id))
            if contest:
                verdict = settle(contest, batch.admit, self._is_current(contest))
                for job in verdict.pause:
                    self.ledger.pause(job, now)
                for job in verdict.enter:
                    self._admit(job, batch.worker_id, now)
                if verdict.again:
                    again[batch.worker_id] = renewed(contest, verdict.again)
        self._dirty |= not event.batches
        if again:
            self._ask(again)

    def _still_held(self, worker_id: str, contest: Contest | None) -> Contest | None:
        """The contest, if its worker is still the one that was asked for."""
        worker = self.workers.get(worker_id)
        return contest if contest and worker and worker.link == contest.link else None

    def _is_current(self, contest: Contest) -> Callable[[Job], bool]:
        def current(job: Job) -> bool:
            """It still waits, or runs, as it did."""
            then = Phase.RUNNING if job.request_id in contest.challenged else Phase.QUEUED
            return job.phase is then

        return current

    def _admit(self, job: Job, worker_id: str, now: float) -> None:
        if self.ledger.admit(job, worker_id, now):
            address = self.workers[worker_id].view.address
            self._actions.append(
                ev.Place(job.link, job.request_id, worker_id, address, job.queued_s)
            )
        else:
            self._actions.append(ev.Resume(job.link, job.request_id, job.held_tokens))
