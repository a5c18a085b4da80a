"""What the scheduler counts: read off the state where that knows it anyway, else counted here."""

from collections import deque
from collections.abc import Mapping, Sequence
from math import inf

import numpy as np
from prometheus_client import CollectorRegistry

from observability.metrics import scheduler as catalogue
from observability.metrics.instruments import Instruments
from observability.metrics.names import Names
from services.core import RejectReason
from services.forecast import Ints
from services.policies.decision import WaitReason
from services.scheduler.core import events as ev
from services.scheduler.core.state import SchedulerState

MOST_PLANS = 256  # of a worker, sent and not heard of yet: with more, the oldest age is not told
REASONS = {reason: reason.name.lower() for reason in WaitReason}


class SchedulerMetrics:
    """Prometheus series of one scheduler, in the registry given."""

    def __init__(self, registry: CollectorRegistry):
        self._make = make = Instruments(registry)
        self._refused = make.counter(catalogue.REFUSED, *RejectReason)
        self._slack = make.histogram(catalogue.SLACK)
        self._infeasible = make.counter(catalogue.INFEASIBLE)
        self._plan_age = make.histogram(catalogue.PLAN_AGE)
        self.fallbacks = make.counter(catalogue.FALLBACKS, "late", "failed", "open")
        self.forecasts_replaced = make.counter(catalogue.REPLACED, "late", "improved")
        self.breaker = make.gauge(catalogue.BREAKER)
        self.advice_dropped = make.counter(catalogue.ADVICE_DROPPED)
        self.round_seconds = make.histogram(catalogue.ROUND)
        self.arranged = make.counter(catalogue.ARRANGED, "batcher", "late", "gone", "wrong")
        self._classes = Names()
        self._round = 0  # the last whose decision was counted
        self._sent: dict[str, deque[tuple[int, float]]] = {}  # by link: plans, and their rounds

    def watch(self, state: SchedulerState) -> None:
        """What is read when Prometheus asks. Called once."""
        ledger, rounds, read = state.ledger, state.rounds, self._make.reading
        read(catalogue.WAITING, lambda: ledger.waiting)
        read(catalogue.RUNNING, lambda: ledger.running)
        read(catalogue.WAITING_FOR, lambda: _waiting_for(rounds.decision.explanations.reasons))
        read(catalogue.DECISIONS, lambda: _by_reason(rounds.said))
        read(catalogue.ADMITTED, lambda: {n: w.admitted for n, w in list(state.workers.items())})
        read(catalogue.MOVES, lambda: ledger.moves)
        read(catalogue.PREEMPTIONS, lambda: ledger.preempted)
        read(catalogue.PEAK, lambda: _peaks(state))
        read(catalogue.WORKERS, lambda: len(state.workers))
        read(catalogue.WORKERS_LOST, lambda: ledger.lost_workers)
        read(catalogue.PRESET, lambda: {state.preset.name: 1})

    def stepped(
        self, event: ev.Event, now: float, actions: Sequence[ev.Action], state: SchedulerState
    ) -> None:
        """Count one step of the state."""
        for action in actions:
            match action:
                case ev.Refuse():
                    self._refused.labels(action.reject.reason.value).inc()
                case ev.Place():
                    self._placed(action.request_id, now, state)
                case ev.SendPlan():
                    sent = self._sent.setdefault(action.link, deque(maxlen=MOST_PLANS))
                    sent.append((action.plan.seq, state.rounds.posed_s))
                case ev.Displace():
                    self._sent.pop(action.link, None)
        match event:
            case ev.Reported():
                self._applied(self._sent.get(event.link), event.report.applied_plan_seq, now)
            case ev.WorkerLost():
                self._sent.pop(event.link, None)
        if state.rounds.decision.round != self._round:
            self._round = state.rounds.decision.round
            for job in state.rounds.late:
                self._infeasible.labels(self._classes.of(job.request.sla.name)).inc()

    def _placed(self, request_id: str, now: float, state: SchedulerState) -> None:
        """Of its first place alone: a token that is out is neither late nor early any more."""
        job = state.jobs.get(request_id)
        if job is None:
            return  # its deadline came with its place
        begun = state.ledger.output(job) or state.ledger.preemptions(job)
        sla = job.request.sla
        if not begun and sla.ttft_s < inf:
            slack_s = job.request.arrival_s + sla.ttft_s - now
            self._slack.labels(self._classes.of(sla.name)).observe(slack_s)

    def _applied(self, sent: deque[tuple[int, float]] | None, seq: int, now: float) -> None:
        while sent and sent[0][0] <= seq:
            self._plan_age.observe(now - sent.popleft()[1])


def _by_reason(counts: Ints) -> Mapping[str, float]:
    return {name: float(counts[reason]) for reason, name in REASONS.items()}


def _waiting_for(reasons: Ints) -> Mapping[str, float]:
    """Of those that a round looked at and left in the queue."""
    by_reason = dict(_by_reason(np.bincount(reasons, minlength=len(WaitReason))))
    del by_reason[REASONS[WaitReason.ADMITTED]]
    return by_reason


def _peaks(state: SchedulerState) -> Mapping[str, float]:
    workers = list(state.workers.values())
    return {w.view.worker_id: w.peak_tokens for w in workers if w.peak_tokens is not None}
