"""The scheduler's core: `step(event, now) → actions`, no clock and no I/O.

An event changes the board and marks it dirty; a Round decides (`rounds/rounds.py`) and sends every
worker whose directives changed one plan. Whoever owns the clock starts a Round when `round_due_s`
has come: what happens at once makes one round, however much it is. Nothing here knows a policy.
"""

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from math import inf

from services.core import (
    Completion,
    FinishReason,
    Reject,
    Report,
    Request,
    RequestProgress,
)
from services.lengths import LEARNABLE_REASONS
from services.policies.decision import Decision
from services.policies.preset import Preset
from services.scheduler.core import adoption, evacuation, static_batches
from services.scheduler.core import events as ev
from services.scheduler.core.admission import Limits, drains_s, hopeless, refusal
from services.scheduler.core.board import RequestPhase
from services.scheduler.core.endings import finish, learn
from services.scheduler.core.forecast_updates import ForecastUpdates
from services.scheduler.core.jobs import Job, WorkerJobs
from services.scheduler.core.ledger import Ledger
from services.scheduler.core.rounds import Rounds, decision_of

DEFAULT_LIMITS = Limits()


class SchedulerState:
    """All the scheduler knows. Mutated by `step` alone; the same events give the same actions.

    `apart`: rounds are arranged by a batcher of its own (AskArrange, answered by Arranged).
    """

    def __init__(self, preset: Preset, limits: Limits = DEFAULT_LIMITS, apart: bool = False):
        self.preset = preset
        self.limits = limits
        self.ledger = Ledger(limits.tenant_weights)
        self.rounds = Rounds(preset, self.ledger)
        self._foretelling = ForecastUpdates(self.ledger)
        self._drains_s: dict[int, float] = {}  # each model's queue, by the last round's reckoning
        self._apart = apart
        self._dirty = False
        self._timers: list[tuple[float, int, str, str]] = []  # when, job's serial and id, or worker
        self._unforeseen: deque[tuple[float, Job]] = deque()  # by when they are to be
        self._actions: list[ev.Action] = []
        self._handlers: dict[str, Callable[..., None]] = {
            "submitted": self._submitted,
            "forecasted": self._forecasted,
            "refreshed": self._refreshed,
            "cancelled": self._cancelled,
            "gateway_lost": self._gateway_lost,
            "worker_attached": self._worker_attached,
            "worker_lost": self._worker_lost,
            "worker_draining": self._worker_draining,
            "reported": self._reported,
            "costed": self._costed,
            "round": self._round,
            "arranged": self._arranged,
            "tick": self._tick,
        }

    def step(self, event: ev.Event, now: float) -> list[ev.Action]:
        """Take one event at time `now` (never falling); returns what is to be done, in order."""
        self._handlers[event.kind](event, now)
        self._ring(now)
        actions, self._actions = self._actions, []
        return actions

    @property
    def jobs(self) -> dict[str, Job]:
        return self.ledger.jobs

    @property
    def workers(self) -> dict[str, WorkerJobs]:
        return self.ledger.workers

    @property
    def round_due_s(self) -> float:
        """From when on a Round is wanted; infinite while there is nothing new to decide."""
        if not self._dirty or self.rounds.contest is not None:
            return inf
        return self.rounds.not_before_s

    @property
    def drain_s(self) -> float:
        """How long the queue takes, of several models the longest; 0 while nobody waits."""
        return max(self._drains_s.values(), default=0.0)

    def next_deadline(self) -> float:
        """When a Tick is due; infinite when nothing waits for time."""
        timer_s = self._timers[0][0] if self._timers else inf
        return min(timer_s, self._patience_ends_s(), self.rounds.next_s)

    def fleet(self) -> ev.Fleet:
        workers = tuple(
            ev.WorkerStatus(w.view, len(w.running), w.used_tokens) for w in self.workers.values()
        )
        prefix_blocks = self.rounds.prefix_blocks
        return ev.Fleet(workers, self.ledger.waiting, self.drain_s, self.preset.name, prefix_blocks)

    def shared_representatives(self) -> list[Request]:
        """One live request for each population forecast in use."""
        shared = {job.shared_key: job.request for job in self.jobs.values()}
        shared.pop("", None)
        return list(shared.values())

    # Requests come and go

    def _submitted(self, event: ev.Submitted, now: float) -> None:
        request = event.request
        known = self.jobs.get(request.request_id)
        if known and known.link != event.link:
            if request.worker_id and request.worker_id == self.ledger.home(known):
                known.link = event.link  # its gateway is back and has gone on with it
                self._actions.append(adoption.standing(self.ledger, known))
                if request.include_forecast:
                    self._actions += self._foretelling.replaced([known])
                return
            self._drop(known)  # resubmitted on a new stream before the old one fell
        if reject := self._refusal(request, now):
            self._actions.append(ev.Refuse(event.link, request.request_id, reject))
            return
        adoption.disown(self.ledger, request)
        job = self.ledger.add(request, event.link)
        if request.deadline_s < inf:
            self._set_timer(request.deadline_s, job)
        self._actions.append(ev.AskForecast((request,)))
        if request.worker_id:
            self._actions += adoption.find_home(self.ledger, job, now)
        phase = self.ledger.phase(job)
        if phase is RequestPhase.FORECASTING:
            self._unforeseen.append((now + self.limits.patience_s, job))
        elif phase is RequestPhase.AWAITED:
            self._set_timer(now + self.limits.adopt_s, job)
        else:
            self._dirty = True  # adopted

    def _refusal(self, request: Request, now: float) -> Reject | None:
        model = self.ledger.board.models.get(request.model)
        drain_s = 0.0 if model is None else self._drains_s.get(model, 0.0)
        return refusal(self.ledger, self.limits, request, drain_s, now)

    def _forecasted(self, event: ev.Forecasted, now: float) -> None:
        asked: list[Job] = []
        for request_id, forecast in event.forecasts:
            job = self.jobs.get(request_id)
            if job:
                job.shared_key = forecast.shared_key
                self.ledger.foresee(job, forecast)
                if job.request.include_forecast and job.forecast != forecast:
                    job.forecast = forecast
                    asked.append(job)
                if self.ledger.phase(job) is RequestPhase.FORECASTING:
                    self.ledger.enqueue(job)
                self._dirty = True
        if asked:
            self._actions += self._foretelling.replaced(asked)

    def _refreshed(self, event: ev.Refreshed, now: float) -> None:
        for forecast in event.forecasts:
            self.ledger.board.renew(forecast)
        if self.ledger.askers:
            self._actions += self._foretelling.refreshed(event.forecasts, now)
        self._dirty = True

    def _cancelled(self, event: ev.Cancelled, now: float) -> None:
        job = self.jobs.get(event.request_id)
        if job and job.link == event.link:
            self._learn(job, event.reason, event.output_tokens, now)
            self._drop(job)

    def _gateway_lost(self, event: ev.GatewayLost, now: float) -> None:
        for job in [job for job in self.jobs.values() if job.link == event.link]:
            self._drop(job)

    def _drop(self, job: Job) -> None:
        self.ledger.drop(job)
        self._dirty = True

    def _finish(
        self, job: Job, reason: FinishReason, output_tokens: int, now: float, message: str = ""
    ) -> None:
        self._actions.append(finish(self.ledger, job, reason, output_tokens, now, message))

    def _learn(self, job: Job, reason: FinishReason, output_tokens: int, now: float) -> None:
        if reason in LEARNABLE_REASONS:
            self._actions.append(learn(self.ledger, job, reason, output_tokens, now))

    # Time

    def _set_timer(self, due_s: float, job: Job) -> None:
        heappush(self._timers, (due_s, self._serial(job), job.request_id, ""))

    def _serial(self, job: Job) -> int:
        return int(self.ledger.board.jobs.serial[job.row])

    def _tick(self, event: ev.Tick, now: float) -> None:
        """Time has passed; every step looks at what was due."""

    def _ring(self, now: float) -> None:
        """What is due by now: deadlines, waits for who did not come back, and the next round."""
        while self._timers and self._timers[0][0] <= now:
            _, serial, request_id, worker_id = heappop(self._timers)
            if worker_id:
                self._dirty |= adoption.abandon_orphans(self.ledger, worker_id)
            elif (job := self.jobs.get(request_id)) and self._serial(job) == serial:
                self._job_due(job, now)
        while self._patience_ends_s() <= now:
            self.ledger.enqueue(self._unforeseen.popleft()[1])
            self._dirty = True
        if self.rounds.next_s <= now:
            self.rounds.next_s = inf
            self._dirty = True

    def _job_due(self, job: Job, now: float) -> None:
        if job.request.deadline_s <= now:
            output_tokens = self.ledger.output(job)
            self._finish(job, FinishReason.DEADLINE, output_tokens, now, "the deadline passed")
            self._drop(job)
        elif self.ledger.phase(job) is RequestPhase.AWAITED:
            self._actions += adoption.begin_anew(self.ledger, job)
            self._dirty = True

    def _patience_ends_s(self) -> float:
        """When the first that still has no forecast goes on without."""
        while self._unforeseen and not self._is_unforeseen(self._unforeseen[0][1]):
            self._unforeseen.popleft()
        return self._unforeseen[0][0] if self._unforeseen else inf

    def _is_unforeseen(self, job: Job) -> bool:
        live = self.jobs.get(job.request_id) is job
        return live and self.ledger.phase(job) is RequestPhase.FORECASTING

    def _end_hopeless(self, rows: list[int], now: float) -> None:
        for row in rows:
            job = self.ledger.job_of(row)
            if job:
                why = "the deadline could not be met any more"
                self._finish(job, FinishReason.DEADLINE, self.ledger.output(job), now, why)
                self._drop(job)

    # Workers come, report and go

    def _worker_attached(self, event: ev.WorkerAttached, now: float) -> None:
        worker_id = event.view.worker_id
        self._actions += adoption.attach(self.ledger, event, now)
        self.workers[worker_id].draft.ask_prefixes = self.rounds.prefix_blocks > 0
        if self.workers[worker_id].orphans:
            heappush(self._timers, (now + self.limits.adopt_s, -1, "", worker_id))
        self._dirty = True

    def _worker_lost(self, event: ev.WorkerLost, now: float) -> None:
        worker = self.workers.get(event.worker_id)
        if worker and worker.link == event.link:
            self._actions += adoption.lose(self.ledger, event.worker_id, now)
            self._dirty = True

    def _worker_draining(self, event: ev.WorkerDraining, now: float) -> None:
        worker = self.workers.get(event.worker_id)
        if worker and worker.link == event.link:
            worker.leaving = True
            self._dirty = True

    def _costed(self, event: ev.Costed, now: float) -> None:
        if event.worker_id in self.workers:
            self.workers[event.worker_id].cost = event.cost

    def _reported(self, event: ev.Reported, now: float) -> None:
        worker = self.workers.get(event.worker_id)
        report = event.report
        if not worker or worker.link != event.link or report.seq <= worker.report_seq:
            return
        worker.report_seq = report.seq
        worker.free_blocks, worker.shared_blocks = report.free_blocks, report.shared_blocks
        worker.hear_of_orphans(report)
        worker.prefixes.hear(report)
        here = worker.number
        home, jobs = self.ledger.board.jobs.home, self.jobs
        self.ledger.progress(
            [
                (job, told)
                for told in report.progress
                if (job := jobs.get(told.request_id)) and home[job.row] == here
            ],
            now,
        )
        for completion in report.finished:
            if job := self._here(completion.request_id, worker):
                if job.admitted_seq > report.applied_plan_seq:
                    worker.draft.forget(job.request_id)  # or it would await a prompt, once it reads
                self._completed(job, completion, now)
        for told in report.evicted:
            if job := self._here(told.request_id, worker):
                self._evicted(job, worker, told, report, now)
        for job in self.ledger.take_paused(worker, report.applied_plan_seq):
            self._tell_preempted(job)
        if worker.served:
            over = static_batches.take_over(worker, report, self.ledger, now)
            self._actions += [ev.Timed(event.worker_id, timing) for timing in over]
        self._dirty = True

    def _here(self, request_id: str, worker: WorkerJobs) -> Job | None:
        """A job that runs there, or was paused or evicted there."""
        job = self.jobs.get(request_id)
        return job if job and self.ledger.home(job) == worker.view.worker_id else None

    def _evicted(
        self, job: Job, worker: WorkerJobs, told: RequestProgress, report: Report, now: float
    ) -> None:
        """Unless it was paused before, and runs again by a plan that came after."""
        runs = job.request_id in worker.running
        self.ledger.progress([(job, told)], now)
        if runs and report.applied_plan_seq >= job.resumed_seq:
            self.ledger.evict(job, worker, now)
            self._tell_preempted(job)
        elif worker.pausing.pop(job.request_id, None):
            self._tell_preempted(job)  # it stopped before it read that it should

    def _completed(self, job: Job, completion: Completion, now: float) -> None:
        self._learn(job, completion.reason, completion.output_tokens, now)
        self._finish(job, completion.reason, completion.output_tokens, now)
        self.ledger.end(job)

    def _tell_preempted(self, job: Job) -> None:
        self._actions.append(adoption.preempt(self.ledger, job))

    # A planning round

    def _round(self, event: ev.Round, now: float) -> None:
        """Early or twice, it only looks again; while one is out, there is nothing to ask."""
        if self.rounds.contest is not None:
            return
        self._dirty = False
        if evacuation.evacuate_all(self.ledger, now) and self._apart:
            self._actions += self.rounds.take_plans(now)  # an arrangement may take its time
        snapshot = self.ledger.board.snapshot(now, self.ledger.seats())
        self._drains_s = drains_s(snapshot)
        if late := hopeless(snapshot):
            self._end_hopeless(late, now)
            snapshot = self.ledger.board.snapshot(now, snapshot.workers)
        contest = self.rounds.pose(snapshot)
        if self._apart and not contest.is_running.all():
            self.rounds.contest = contest
            self._actions.append(ev.AskArrange(contest.round))
        else:
            self._carry_out(self.rounds.arrange(contest), now)

    def _arranged(self, event: ev.Arranged, now: float) -> None:
        contest = self.rounds.contest
        if contest is None or contest.round != event.round:
            return
        self.rounds.contest = None
        told = event.portions is not None
        self._carry_out(decision_of(contest, event) if told else self.rounds.arrange(contest), now)

    def _carry_out(self, decision: Decision, now: float) -> None:
        """What it says, and what has happened since the last, in one plan for each worker."""
        self._actions += self.rounds.take(decision, now)
        if self.ledger.untold and (ranking := self.rounds.ranking):
            next_s = self.rounds.next_s
            self._actions += self._foretelling.looked_at(ranking, next_s, now)
        self._actions += self.rounds.take_plans(now)
