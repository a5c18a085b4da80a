"""Recovery from losses, and the bound on every wait of a live choice."""

import logging
from math import inf

from gateway.admission.retry_budget import RetryBudget
from gateway.config import GatewayConfig
from gateway.metrics import Metrics
from gateway.sessions.call import ClientCall, LiveChoice
from gateway.sessions.submission import PendingEnd
from gateway.sessions.submit import Submitter
from gateway.sessions.table import PeerState, SessionTable
from gateway.types.errors import MIN_RETRY_S
from gateway.types.outcome import ResubmitCause
from services.core import FinishReason
from services.runtime.errors import Code, ServiceError

log = logging.getLogger(__name__)


class Recovery:
    """Resubmits what was lost, within the retry budget, and ends what waits too long."""

    def __init__(
        self,
        config: GatewayConfig,
        table: SessionTable,
        peers: PeerState,
        submitter: Submitter,
        retries: RetryBudget,
        metrics: Metrics,
    ):
        self._config, self._table, self._peers = config, table, peers
        self._submitter, self._retries, self._metrics = submitter, retries, metrics
        self._swept_s = inf

    def resubmit(self, live: LiveChoice, cause: ResubmitCause, now_s: float) -> None:
        """Part of a choice was lost. The only recovery path. A failed choice that still waits for
        the worker's reason ends."""
        end = live.submission.pending_end
        if end is not None and end.failure is not None:
            self._table.end(live, end.reason, now_s, end.failure)
            return
        if cause is not ResubmitCause.SCHEDULER:
            self._submitter.cancel(live)
        if live.session.full:
            self._table.end(live, FinishReason.LENGTH, now_s)
            return
        if not self._may_resubmit(live, cause, now_s):
            message = "the retry budget is exhausted after repeated losses; retry later"
            retry_s = max(MIN_RETRY_S, self._peers.fleet.drain_left_s(now_s))
            failure = ServiceError(Code.UNAVAILABLE, message, retry_s)
            self._table.end(live, FinishReason.ERROR, now_s, failure)
            return
        self._metrics.resubmissions.labels(cause.value).inc()
        live.session.timeline.on_preempted()
        self._table.withdraw(live)
        if self._peers.scheduler_connected:
            self._submitter.submit(live, now_s)

    def end_at_deadline(self, call: ClientCall, now_s: float) -> None:
        """The deadline of a call has passed: ends and cancels its choices."""
        for live in call.choices:
            if not live.session.over:
                self._submitter.cancel(live, FinishReason.DEADLINE)
                self._table.end(live, FinishReason.DEADLINE, now_s)

    def sweep(self, now_s: float, scheduler_lost_s: float) -> None:
        """Ends or resubmits whatever waits too long. Called a few times per second; O(live)."""
        turn_s = max(0.0, now_s - self._swept_s)
        active, self._peers.active_streams = self._peers.active_streams, set()
        self._swept_s = now_s
        for live in self._table:
            if live.session.over:  # ended during this sweep, with another choice of its call
                continue
            if scheduler_lost_s > self._config.scheduler_wait_s:
                failure = ServiceError(Code.UNAVAILABLE, "the scheduler is not reachable")
                self._table.end(live, FinishReason.ERROR, now_s, failure)
            elif live.submission.pending_end is not None:
                live.submission.pending_end.wait(turn_s, live.submission.address in active)
                self._check_pending_end(live, live.submission.pending_end, now_s)
            elif live.call.waits_for_client:
                self._check_client(live.call, now_s)

    def _may_resubmit(self, live: LiveChoice, cause: ResubmitCause, now_s: float) -> bool:
        """A confirmed loss is resubmitted once, and once more after each new token. Any further
        resubmission spends the retry budget."""
        submission = live.submission
        progressed = (
            not submission.address
            or submission.attempts == 1
            or len(live.session.output) > submission.had_tokens
        )
        return (cause.confirmed and progressed) or self._retries.try_spend(now_s)

    def _check_pending_end(self, live: LiveChoice, end: PendingEnd, now_s: float) -> None:
        """The scheduler has reported the end before the worker's tokens, or its reason for a
        failure, arrived. While the stream is alive, they are late but not lost. A stream that
        delivers nothing for `finish_wait_s` is dead; tokens later than `late_wait_s` are lost. A
        failure waits at most `finish_wait_s` for its reason."""
        config = self._config
        if end.failure is not None:
            if end.waited_s >= config.finish_wait_s or not self._peers.holds(live.submission):
                self._table.end(live, end.reason, now_s, end.failure)
        elif len(live.session.output) >= end.tokens:
            self._table.end(live, end.reason, now_s)
        elif end.quiet_s >= config.finish_wait_s or end.waited_s >= config.late_wait_s:
            self.resubmit(live, ResubmitCause.LATE, now_s)

    def _check_client(self, call: ClientCall, now_s: float) -> None:
        stalled_s = now_s - call.taken_s
        if stalled_s > self._config.client_stall_s:
            log.info(
                "the client has read nothing for %g s; closing its call",
                stalled_s,
                extra={"request_id": call.request_id},
            )
            call.close()
            if call.writer is not None:
                call.writer.cancel()
