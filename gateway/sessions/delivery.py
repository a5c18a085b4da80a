"""Tokens from workers to clients, and the outcome of each delivered choice."""

import time
from collections.abc import Callable
from math import inf

from gateway.metrics import Metrics
from gateway.peers.border import check_cached
from gateway.sessions.call import ClientCall, LiveChoice
from gateway.sessions.event_pace import EventPace
from gateway.sessions.outcome_history import OutcomeHistory
from gateway.sessions.recovery import Recovery
from gateway.sessions.session import FeedResult
from gateway.sessions.submit import Submitter
from gateway.sessions.table import PeerState, SessionTable
from gateway.types.outcome import ChoiceOutcome, ResubmitCause
from protos.generated import worker_pb2
from services.core import FinishReason
from services.runtime.codecs.common import decode_reason
from services.runtime.errors import Code, ServiceError


class DeliveryHandler:
    """Feeds workers' tokens to sessions, and owns the client calls (`CallOwner`)."""

    def __init__(
        self,
        history: OutcomeHistory,
        table: SessionTable,
        peers: PeerState,
        submitter: Submitter,
        recovery: Recovery,
        metrics: Metrics,
        pace: EventPace,
        live: Callable[[], int],
    ):
        """`pace` is that of all `live()` choices of the process."""
        self.history = history
        self._table, self._peers = table, peers
        self._pace, self._live = pace, live
        self._messages = 0  # to clients so far
        self._submitter, self._recovery, self._metrics = submitter, recovery, metrics

    # From workers

    def on_tokens(self, address: str, batch: worker_pb2.TokenBatch, now_s: float) -> None:
        """Feeds one message of a worker. O(tokens): a lookup, a slice and a decode each."""
        self._peers.active_streams.add(address)
        total, messages = 0, self._messages
        for tokens in batch.requests:
            live = self._table.get(tokens.request_id)
            # A worker that was taken for lost may be late: its requests continue elsewhere.
            if live is not None and live.submission.address == address:
                total += self._feed(live, tokens, now_s)
        self._metrics.generation_tokens.inc(total)
        elapsed_s = time.monotonic() - now_s
        self._pace.on_tokens(len(batch.requests), self._messages - messages, elapsed_s)

    def _feed(self, live: LiveChoice, tokens: worker_pb2.RequestTokens, now_s: float) -> int:
        """The number of new tokens."""
        session = live.session
        had = len(session.output)
        reason = decode_reason(tokens.finish_reason) if tokens.finish_reason else None
        if reason is FinishReason.ERROR:
            if live.submission.announced:
                self._submitter.cancel(live)
            session.timeline.rejected = tokens.refused
            self._table.end(live, reason, now_s, _failure(tokens))
            return 0
        if not had:
            check_cached(tokens.cached_tokens, live.request.prompt_tokens)
            session.add_prompt_info(tokens.cached_tokens, tokens.prompt_logprobs)
        result = session.feed(tokens.offset, tokens.token_ids, tokens.logprobs, reason, now_s)
        if result is FeedResult.GAP:
            self._recovery.resubmit(live, ResubmitCause.GAP, now_s)
        elif result is FeedResult.CUT:
            self._recovery.resubmit(live, ResubmitCause.REASONING, now_s)
        elif result is FeedResult.END:
            if live.submission.announced or (session.stopped_by_text and reason is None):
                stopped = session.reason is FinishReason.STOP
                self._submitter.cancel(
                    live, FinishReason.STOP if stopped else FinishReason.CANCELLED
                )
            self._table.remove(live)
        if result is not FeedResult.NONE:
            live.call.notify(session, now_s)
        new = len(session.output) - had
        if new and live.call.whole and session.timeline.gap_s is not None:
            self.on_gap(session.timeline.gap_s, new)
        return new

    # From client calls

    def message_interval_s(self) -> float:
        """Seconds until the next message of a call that sends one now."""
        self._messages += 1
        return self._pace.interval_s(self._live())

    def release(self, call: ClientCall, now_s: float) -> None:
        """The client has everything or is gone: cancels what still runs."""
        for live in call.choices:
            if not live.session.over:
                self._submitter.cancel(live)
                self._table.end(live, FinishReason.CANCELLED, now_s)

    def on_gap(self, gap_s: float, tokens: int) -> None:
        self._metrics.gaps.observe(gap_s / tokens, tokens)

    def on_delivered(self, live: LiveChoice, outcome: ChoiceOutcome) -> None:
        self.history.add(live.submission.wire_id, outcome)
        self._metrics.on_delivered(outcome)
        timeline = outcome.timeline
        reads = live.request.open_reader is not None
        content_s = live.session.content_s if reads else timeline.first_token_s
        if content_s < inf:
            self._metrics.on_content(content_s - timeline.arrival_s)
        if tracker := live.session.forecast_tracker:
            if tracker.opening is not None:
                kept = tracker.is_promise_kept(outcome.timeline)
                self._metrics.on_forecast_outcome(tracker.opening, kept, outcome)
            tracker.record_answer(outcome.timeline)


def _failure(tokens: worker_pb2.RequestTokens) -> ServiceError:
    """A refusal depends on the request and the model: every worker of the model would refuse it, so
    that the request is invalid."""
    code = Code.INVALID_ARGUMENT if tokens.refused else Code.INTERNAL
    return ServiceError(code, tokens.message or "the worker failed; retrying is safe")
