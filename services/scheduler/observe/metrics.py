"""The scheduler's metrics: read from the state where it has the value, else counted from steps."""

from collections import deque
from collections.abc import Callable, Mapping
from math import inf

import numpy as np
from prometheus_client import CollectorRegistry

from observability.metrics import scheduler as catalogue
from observability.metrics.instruments import BoundedLabels, Instruments
from services.core import RejectReason
from services.forecast import Ints
from services.policies.cadence import INTERVAL_S
from services.policies.decision import WaitReason
from services.runtime.telemetry.invalid_messages import InvalidMessages
from services.scheduler.core import events as ev
from services.scheduler.core.failures.containment import CONTAINED_KINDS
from services.scheduler.core.jobs import WorkerJobs
from services.scheduler.core.phases import Transition, TransitionCause
from services.scheduler.core.state import SchedulerState
from services.scheduler.leadership.keeper import Leadership

MAX_PLANS = 256  # sent to a worker and not applied yet; beyond it the oldest age is not observed
PREEMPTIONS = (TransitionCause.PAUSED, TransitionCause.EVICTED, TransitionCause.LOST)
REASONS = {reason: reason.name.lower() for reason in WaitReason}


class SchedulerMetrics:
    """The Prometheus series of one scheduler."""

    def __init__(self, registry: CollectorRegistry):
        self._make = make = Instruments(registry)
        self._refused = make.counter(catalogue.REFUSED, *RejectReason)
        self._preempted = make.counter(catalogue.PREEMPTIONS, *PREEMPTIONS)
        self._slack = make.histogram(catalogue.SLACK)
        self._infeasible = make.counter(catalogue.INFEASIBLE)
        self._plan_age = make.histogram(catalogue.PLAN_AGE)
        self.fallbacks = make.counter(catalogue.FALLBACKS, "late", "failed", "open")
        self.forecasts_replaced = make.counter(catalogue.REPLACED, "late", "improved")
        self.breaker = make.gauge(catalogue.BREAKER)
        self.advice_dropped = make.counter(catalogue.ADVICE_DROPPED)
        self.round_seconds = make.histogram(catalogue.ROUND)
        self.arranged = make.counter(catalogue.ARRANGED, "batcher", "late", "gone", "wrong")
        self.invalid = InvalidMessages(registry, catalogue.INVALID, "Attach", "Submit")
        self._quarantined = make.counter(catalogue.QUARANTINED, *CONTAINED_KINDS)
        self._classes = BoundedLabels()
        self._round = 0  # last round with a counted decision
        self._sent: dict[str, deque[tuple[int, float]]] = {}  # by link: plan, time of its round

    def watch(self, state: SchedulerState) -> None:
        """Registers the values that are read from the state at each scrape. Called once."""
        ledger, rounds, read = state.ledger, state.rounds, self._make.reading
        read(catalogue.WAITING, lambda: ledger.waiting)
        read(catalogue.RUNNING, lambda: ledger.running)
        read(catalogue.WAITING_FOR, lambda: _waiting_for(rounds.decision.explanations.reasons))
        read(catalogue.DECISIONS, lambda: _by_reason(rounds.reasons))
        read(catalogue.ADMITTED, lambda: {n: w.admitted for n, w in list(state.workers.items())})
        read(catalogue.MOVES, lambda: ledger.moves)
        read(catalogue.PEAK, lambda: _peaks(state))
        read(catalogue.PLAN_INTERVAL, lambda: rounds.memory.number(INTERVAL_S))
        read(catalogue.KV_IDLE, lambda: _idle(state, _free_kv_share))
        read(catalogue.SLOTS_IDLE, lambda: _idle(state, _free_slots_share))
        read(catalogue.WORKERS, lambda: len(state.workers))
        read(catalogue.WORKERS_LOST, lambda: ledger.lost_workers)
        read(catalogue.DISPLACED, lambda: ledger.displaced_workers)
        read(catalogue.SUSPECTED, lambda: ledger.suspicions)
        read(catalogue.PRESET, lambda: {state.preset.name: 1})

    def watch_leadership(self, leadership: Leadership) -> None:
        """Registers whether this scheduler leads. Called once."""
        self._make.reading(catalogue.LEADS, lambda: leadership.leads)
        self._make.reading(catalogue.LEADER_CHANGES, lambda: leadership.changes)

    def count_quarantined(self, kind: str) -> None:
        """Counts an event that the state failed to apply."""
        self._quarantined.labels(kind).inc()

    def observe(self, step: ev.Step, state: SchedulerState) -> None:
        for transition in step.transitions:
            self._changed(transition, state)
        for action in step.actions:
            match action:
                case ev.SendPlan():
                    sent = self._sent.setdefault(action.link, deque(maxlen=MAX_PLANS))
                    sent.append((action.plan.seq, state.rounds.began_s))
                case ev.Displace():
                    self._sent.pop(action.link, None)
        match step.event:
            case ev.Reported(link=link, report=report):
                self._applied(self._sent.get(link), report.applied_plan_seq, step.now)
            case ev.WorkerLost(link=link):
                self._sent.pop(link, None)
        if state.rounds.decision.round != self._round:
            self._round = state.rounds.decision.round
            for job in state.rounds.late:
                self._infeasible.labels(self._classes.label(job.request.sla.name)).inc()

    def _changed(self, t: Transition, state: SchedulerState) -> None:
        match t.cause:
            case TransitionCause.REFUSED:
                self._refused.labels(t.reason).inc()
            case TransitionCause.PLACED:
                self._placed(t, state)
            case cause if cause in PREEMPTIONS:
                self._preempted.labels(cause.value).inc()

    def _placed(self, t: Transition, state: SchedulerState) -> None:
        """Observes the slack of a first placement; later ones have tokens out already."""
        job = state.jobs.get(t.request_id)
        if job and not (t.output_tokens or t.preemptions) and job.request.sla.ttft_s < inf:
            slack_s = job.request.arrival_s + job.request.sla.ttft_s - t.at_s
            self._slack.labels(self._classes.label(job.request.sla.name)).observe(slack_s)

    def _applied(self, sent: deque[tuple[int, float]] | None, seq: int, now: float) -> None:
        while sent and sent[0][0] <= seq:
            self._plan_age.observe(now - sent.popleft()[1])


def _by_reason(counts: Ints) -> Mapping[str, float]:
    return {name: float(counts[reason]) for reason, name in REASONS.items()}


def _waiting_for(reasons: Ints) -> Mapping[str, float]:
    """Requests that the last round considered and left in the queue, by reason."""
    by_reason = dict(_by_reason(np.bincount(reasons, minlength=len(WaitReason))))
    del by_reason[REASONS[WaitReason.ADMITTED]]
    return by_reason


def _peaks(state: SchedulerState) -> Mapping[str, float]:
    workers = list(state.workers.values())
    return {w.view.worker_id: w.peak_tokens for w in workers if w.peak_tokens is not None}


def _idle(state: SchedulerState, share: Callable[[WorkerJobs], float]) -> Mapping[str, float]:
    """This share of each worker while requests wait; 0 while none waits."""
    waits = state.ledger.waiting > 0
    return {w.view.worker_id: waits * share(w) for w in list(state.workers.values())}


def _free_kv_share(worker: WorkerJobs) -> float:
    return worker.free_blocks / max(1, worker.kv_blocks)


def _free_slots_share(worker: WorkerJobs) -> float:
    return max(0.0, 1 - len(worker.running) / max(1, worker.slots))
