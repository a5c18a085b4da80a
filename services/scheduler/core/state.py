"""The scheduler's core: `step(event, now) → actions`, without clock or I/O.

An event changes the ledger and makes workers due (`turns.py`). A Round decides about a turn of
workers (`rounds.py`) and sends one plan to every worker with changed directives. The service, which
has the clock, starts a Round once `round_due_s` has come, so that one round serves all events that
arrived together. Policies are data here: nothing tests a preset's name.
"""

from collections import deque
from functools import partial
from heapq import heappop, heappush
from math import inf

from services.core import Completion, FinishReason, Report, RequestProgress
from services.lengths import LEARNABLE_REASONS
from services.policies.decision import Decision
from services.policies.preset import Preset
from services.scheduler.core import events as ev
from services.scheduler.core.admission import (
    SchedulerLimits,
    drain_times_s,
    find_refusal,
    find_unreachable_deadlines,
)
from services.scheduler.core.failures import containment, handover
from services.scheduler.core.failures.suspicion import SuspicionLimits
from services.scheduler.core.forecast_updates import ForecastUpdates
from services.scheduler.core.jobs import Fleet, Job, WorkerJobs, WorkerStatus
from services.scheduler.core.ledger import Ledger
from services.scheduler.core.phases import RequestPhase, TransitionCause
from services.scheduler.core.rounds import Rounds, build_decision
from services.scheduler.core.static_batches import pop_ended

DEFAULT_LIMITS = SchedulerLimits()
UNSEEN_MODEL = -1  # number of a model without a request so far


class SchedulerState:
    """Everything the scheduler knows. Only `step` changes it, and equal events give equal actions.

    `apart`: a batcher process arranges the rounds (AskArrange, answered by Arranged).
    """

    def __init__(
        self, preset: Preset, limits: SchedulerLimits = DEFAULT_LIMITS, apart: bool = False
    ):
        self.preset = preset
        self.limits = limits
        self.ledger = Ledger(limits.tenant_weights)
        self.rounds = Rounds(preset, self.ledger)
        self.last_step = ev.Step(ev.Tick(), -inf, (), ())
        self._forecast_updates = ForecastUpdates(self.ledger)
        self._drains_s: dict[int, float] = {}  # by model, from the last round
        self._apart = apart
        suspicion = SuspicionLimits(limits.suspect_s, limits.suspect_gaps)
        self._silence = handover.SilenceWatch(self.ledger, suspicion)
        self._timers: list[tuple[float, int, str, str]] = []  # due, serial, request, worker
        # Jobs without a first forecast, each with the time until which it waits for one.
        self._forecasting: deque[tuple[float, Job]] = deque()

    def step(self, event: ev.Event, now: float) -> list[ev.Action]:
        """Applies one event at time `now`, which never decreases; returns the actions in order."""
        if error := self.try_step(event, now).error:
            raise error
        return self.ledger.actions

    def try_step(self, event: ev.Event, now: float) -> ev.Step:
        """The same for serving: an error that `contain` returns is in the step, not raised."""
        (ledger := self.ledger).begin_step(now)
        error = containment.contain(partial(self._apply, now), event, ledger)
        if error is not None:
            self.rounds.turns.note_all()
        self._run_timers(now)
        self.last_step = ev.Step(event, now, ledger.actions, ledger.transitions, error)
        return self.last_step

    def _apply(self, now: float, event: ev.Event) -> None:  # noqa: C901, PLR0912 - a case per event
        match event:
            case ev.Submitted():
                self._submitted(event, now)
            case ev.Forecasted():
                self._forecasted(event)
            case ev.Refreshed():
                self._refreshed(event, now)
            case ev.Cancelled():
                self._cancelled(event)
            case ev.GatewayLost():
                self._gateway_lost(event)
            case ev.WorkerAttached():
                self._worker_attached(event, now)
            case ev.WorkerLost():
                self._worker_lost(event)
            case ev.WorkerDraining():
                self._worker_draining(event)
            case ev.WorkerAlive():
                if worker := self._on_stream(event.worker_id, event.link):
                    worker.heard = worker.beats = True
            case ev.Reported():
                self._reported(event)
            case ev.Costed():
                if worker := self.workers.get(event.worker_id):
                    worker.set_cost(event.cost)
            case ev.Round():
                self._round(now)
            case ev.Arranged():
                self._arranged(event, now)
            case ev.Tick():
                pass  # every step runs the timers

    @property
    def jobs(self) -> dict[str, Job]:
        return self.ledger.jobs

    @property
    def workers(self) -> dict[str, WorkerJobs]:
        return self.ledger.workers

    @property
    def round_due_s(self) -> float:
        """The time from which a Round is due; infinite while there is nothing new to decide."""
        decides = self.rounds.turns.pending and self.rounds.candidates is None
        return self.rounds.not_before_s if decides else inf

    @property
    def drain_s(self) -> float:
        """The longest drain time of any model's queue; 0 with empty queues."""
        return max(self._drains_s.values(), default=0.0)

    def next_deadline(self) -> float:
        """The time at which a Tick is due; infinite if there is no timer."""
        timer_s = self._timers[0][0] if self._timers else inf
        return min(timer_s, self._patience_ends_s(), self.rounds.next_s, self._silence.due_s)

    def fleet(self) -> Fleet:
        workers = tuple(
            WorkerStatus(w.view, len(w.running), w.used_tokens) for w in self.workers.values()
        )
        prefix_blocks = self.rounds.prefix_blocks
        return Fleet(workers, self.ledger.waiting, self.drain_s, self.preset.name, prefix_blocks)

    # Requests

    def _submitted(self, event: ev.Submitted, now: float) -> None:
        request, ledger = event.request, self.ledger
        known = self.jobs.get(request.request_id)
        if known and known.link != event.link:
            if request.worker_id and request.worker_id == ledger.home(known):
                self._rejoin(known, event.link)
                return
            self._drop(known, TransitionCause.SUPERSEDED)  # its earlier stream has not ended yet
        model = ledger.board.models.get(request.model, UNSEEN_MODEL)
        drain_s = self._drains_s.get(model, 0.0)
        if reject := find_refusal(ledger, self.limits, request, drain_s, now):
            ledger.reject(request, event.link, reject)
            return
        handover.drop_other_orphans(ledger, request)
        job = ledger.add(request, event.link)
        if request.deadline_s < inf:
            self._set_timer(request.deadline_s, job)
        ledger.actions.append(ev.AskForecast((request,)))
        if request.worker_id:
            handover.find_home(ledger, job)
        match ledger.phase(job):
            case RequestPhase.FORECASTING:
                self._forecasting.append((now + self.limits.patience_s, job))
            case RequestPhase.AWAITING_WORKER:
                self._set_timer(now + self.limits.adopt_s, job)
            case _:
                self.rounds.turns.note_all()  # adopted

    def _rejoin(self, job: Job, link: str) -> None:
        """The gateway reconnected and continues a request that is still at its worker."""
        job.link = link
        self.ledger.note(job, TransitionCause.REJOINED)
        self.ledger.actions += self._forecast_updates.rejoined(job)

    def _forecasted(self, event: ev.Forecasted) -> None:
        changed: list[Job] = []
        for request_id, forecast in event.forecasts:
            if job := self.jobs.get(request_id):
                job.shared_key = forecast.shared_key
                self.ledger.board.set_forecast(job.row, forecast, job.request.min_tokens)
                self.ledger.actions += self._forecast_updates.bounded(job, forecast)
                if job.request.include_forecast and job.accept(forecast):
                    changed.append(job)
                if self.ledger.phase(job) is RequestPhase.FORECASTING:
                    self.ledger.enqueue(job)
                    self.rounds.prefer_cached(job)
                self.rounds.turns.note_all()
        if changed:
            self.ledger.actions += self._forecast_updates.replaced(changed)

    def _refreshed(self, event: ev.Refreshed, now: float) -> None:
        for forecast in event.forecasts:
            self.ledger.board.renew(forecast)
        if self.ledger.with_forecast:
            self.ledger.actions += self._forecast_updates.refreshed(event.forecasts, now)
        self.rounds.turns.note_all()

    def _cancelled(self, event: ev.Cancelled) -> None:
        job = self.jobs.get(event.request_id)
        if not job or job.link != event.link:
            return
        if event.reason is FinishReason.DEADLINE:  # by the gateway's clock
            self._end_at_deadline(job, "the deadline passed")
        else:
            self._learn(job, event.reason, event.output_tokens)
            self._drop(job, TransitionCause.CANCELLED, event.reason, "", event.output_tokens)

    def _gateway_lost(self, event: ev.GatewayLost) -> None:
        for job in [job for job in self.jobs.values() if job.link == event.link]:
            self._drop(job, TransitionCause.GATEWAY_LOST, "gateway_lost")

    def _drop(self, job: Job, cause: TransitionCause, reason: str = "", message: str = "",
              output_tokens: int | None = None) -> None:  # fmt: skip
        worker = self.workers.get(self.ledger.home(job))
        self.ledger.drop(job, cause, reason, message, output_tokens)
        if worker:
            self.rounds.turns.note(worker.number)
        else:
            self.rounds.turns.note_all()

    def _learn(self, job: Job, reason: FinishReason, output_tokens: int) -> None:
        if reason in LEARNABLE_REASONS:
            preemptions = self.ledger.preemptions(job)
            outcome = job.outcome(reason, output_tokens, preemptions, self.ledger.now)
            self.ledger.actions.append(ev.Learn(outcome))

    # Time

    def _set_timer(self, due_s: float, job: Job) -> None:
        heappush(self._timers, (due_s, self._serial(job), job.request_id, ""))

    def _serial(self, job: Job) -> int:
        return int(self.ledger.board.jobs.serial[job.row])

    def _run_timers(self, now: float) -> None:
        """Handles what is due: deadlines, waits for a worker or a forecast, and the next round."""
        while self._timers and self._timers[0][0] <= now:
            _, serial, request_id, worker_id = heappop(self._timers)
            if worker_id and handover.abandon_orphans(self.ledger, worker_id):
                self.rounds.turns.note_all()
            elif (job := self.jobs.get(request_id)) and self._serial(job) == serial:
                self._job_due(job, now)
        while self._patience_ends_s() <= now:
            self.ledger.enqueue(self._forecasting.popleft()[1])
            self.rounds.turns.note_all()
        if self.rounds.next_s <= now:
            self.rounds.next_s = inf
            self.rounds.turns.note_all()
        if self._silence.due_s <= now and self._silence.check(now):
            self.rounds.turns.note_all()

    def _job_due(self, job: Job, now: float) -> None:
        if job.request.deadline_s <= now:
            self._end_at_deadline(job, "the deadline passed")
        elif self.ledger.phase(job) is RequestPhase.AWAITING_WORKER:
            handover.start_over(self.ledger, job)
            self.rounds.turns.note_all()

    def _end_at_deadline(self, job: Job, message: str) -> None:
        self._drop(job, TransitionCause.FINISHED, FinishReason.DEADLINE, message)

    def _patience_ends_s(self) -> float:
        """When the first request without a forecast is queued without one."""
        while self._forecasting and not self._is_forecasting(self._forecasting[0][1]):
            self._forecasting.popleft()
        return self._forecasting[0][0] if self._forecasting else inf

    def _is_forecasting(self, job: Job) -> bool:
        live = self.jobs.get(job.request_id) is job
        return live and self.ledger.phase(job) is RequestPhase.FORECASTING

    # Workers

    def _worker_attached(self, event: ev.WorkerAttached, now: float) -> None:
        worker = handover.attach(self.ledger, event)
        worker.draft.ask_prefixes = self.rounds.prefix_blocks > 0
        if worker.orphans:
            heappush(self._timers, (now + self.limits.adopt_s, -1, "", event.view.worker_id))
        self.rounds.turns.note_all()

    def _worker_lost(self, event: ev.WorkerLost) -> None:
        if self._on_stream(event.worker_id, event.link):
            self.ledger.detach(event.worker_id)
            self.rounds.turns.note_all()

    def _worker_draining(self, event: ev.WorkerDraining) -> None:
        if worker := self._on_stream(event.worker_id, event.link):
            worker.draining = True
            self.rounds.turns.note_all()

    def _on_stream(self, worker_id: str, link: str) -> WorkerJobs | None:
        """The worker, unless this stream is not its current one."""
        worker = self.workers.get(worker_id)
        return worker if worker and worker.link == link else None

    def _reported(self, event: ev.Reported) -> None:
        worker, report = self._on_stream(event.worker_id, event.link), event.report
        if not worker or report.seq <= worker.report_seq:
            return
        worker.report_seq, worker.applied_seq = report.seq, report.applied_plan_seq
        worker.free_blocks, worker.shared_blocks = report.free_blocks, report.shared_blocks
        worker.set_tokens_per_step(report.tokens_per_step)
        worker.most_running = report.max_running
        worker.heard = True
        worker.update_orphans(report)
        worker.prefixes.update(report)
        self.ledger.progress(report.progress, worker.number)
        for completion in report.finished:
            if job := self._job_here(completion.request_id, worker):
                if job.admitted_seq > report.applied_plan_seq:
                    worker.draft.forget(job.request_id)  # else the worker would await its prompt
                self._completed(job, completion)
        for progress in report.evicted:
            if job := self._job_here(progress.request_id, worker):
                self._evicted(job, worker, progress, report)
        self.ledger.note_stopped(worker, report.applied_plan_seq)
        if worker.served:
            timings = pop_ended(worker, report, self.ledger)
            self.ledger.actions += [ev.Timed(event.worker_id, timing) for timing in timings]
        self.rounds.turns.note(worker.number)

    def _job_here(self, request_id: str, worker: WorkerJobs) -> Job | None:
        """A job that runs there, or was paused or evicted there."""
        job = self.jobs.get(request_id)
        return job if job and self.ledger.home(job) == worker.view.worker_id else None

    def _evicted(
        self, job: Job, worker: WorkerJobs, progress: RequestProgress, report: Report
    ) -> None:
        """Requeues an evicted request, unless a later plan has resumed it already."""
        runs = job.request_id in worker.running
        self.ledger.progress([progress], worker.number)
        if runs and report.applied_plan_seq >= job.resumed_seq:
            self.ledger.evict(job)
        elif worker.pausing.pop(job.request_id, None):
            self.ledger.note(job, TransitionCause.STOPPED)  # evicted before it read the pause

    def _completed(self, job: Job, completion: Completion) -> None:
        reason, tokens = completion.reason, completion.output_tokens
        self._learn(job, reason, tokens)
        self.ledger.end(job, TransitionCause.FINISHED, reason, "", tokens)

    # Rounds

    def _round(self, now: float) -> None:
        """Decides, or asks the batcher to. Does nothing while the batcher's answer is pending."""
        if self.rounds.candidates is not None:
            return
        if handover.evacuate_all(self.ledger) and self._apart:
            self._send_plans()  # before the batcher's answer
        snapshot = self.ledger.board.snapshot(now, self.ledger.worker_snapshots())
        self._drains_s = drain_times_s(snapshot)
        if late := find_unreachable_deadlines(snapshot):
            for job in list(self.ledger.jobs_at(late)):
                self._end_at_deadline(job, "the deadline could not be met any more")
            snapshot = self.ledger.board.snapshot(now, snapshot.workers)
        if settled := self.rounds.settle(snapshot):
            self._carry_out(settled, now)
            return
        snapshot = self.rounds.narrow(snapshot)
        if not self._apart:
            self._carry_out(self.rounds.decide(snapshot), now)
            return
        candidates = self.rounds.select_candidates(snapshot)
        if candidates.is_running.all():
            self._carry_out(self.rounds.arrange(candidates), now)
        else:
            self.rounds.candidates = candidates
            self.ledger.actions.append(ev.AskArrange(candidates.round))

    def _arranged(self, event: ev.Arranged, now: float) -> None:
        candidates = self.rounds.candidates
        if candidates is None or candidates.round != event.round:
            return
        self.rounds.candidates = None
        if event.workers is None:
            self._carry_out(self.rounds.arrange(candidates), now)
        else:
            self._carry_out(self.rounds.complete(build_decision(candidates, event)), now)

    def _carry_out(self, decision: Decision, now: float) -> None:
        self.rounds.apply(decision)
        if self.ledger.awaiting_promise and (ranking := self.rounds.ranking):
            next_s = self.rounds.next_s
            self.ledger.actions += self._forecast_updates.ranked(ranking, next_s, now)
        self._send_plans()

    def _send_plans(self) -> None:
        self.ledger.actions += self.rounds.pop_plans()
