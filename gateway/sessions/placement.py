"""Where choices run: the scheduler's events, and the prompts sent to workers."""

import logging
from collections.abc import Callable
from dataclasses import replace

from gateway.metrics import Metrics
from gateway.peers import messages
from gateway.peers.fleet import read_fleet
from gateway.sessions.call import LiveChoice
from gateway.sessions.recovery import Recovery
from gateway.sessions.submission import PendingEnd
from gateway.sessions.submit import Submitter
from gateway.sessions.table import PeerState, SessionTable
from gateway.types.outcome import ResubmitCause
from protos.generated import scheduler_pb2, worker_pb2
from services.core import FinishReason
from services.runtime.codecs.common import decode_reason
from services.runtime.errors import Code, InvalidArgument, ServiceError

log = logging.getLogger(__name__)

SendToWorker = Callable[[str, worker_pb2.WorkerInput], bool]  # whether the message was queued


class PlacementHandler:
    """Applies the scheduler's events to the session table, and sends each placed choice's prompt
    to its worker."""

    def __init__(
        self,
        table: SessionTable,
        peers: PeerState,
        submitter: Submitter,
        recovery: Recovery,
        metrics: Metrics,
        send: SendToWorker,
    ):
        self._table, self._peers, self._submitter = table, peers, submitter
        self._recovery, self._metrics, self._send = recovery, metrics, send

    # The scheduler's stream

    def on_scheduler_lost(self) -> None:
        """The stream has ended. Until the next one is answered, workers may still deliver tokens
        of earlier submissions."""
        self._peers.scheduler_connected = False

    def on_event(self, event: scheduler_pb2.SchedulerEvent, now_s: float) -> None:
        if event.WhichOneof("kind") == "fleet":
            fleet = read_fleet(event.fleet, self._peers.model, now_s)
            if fleet.adapters is None:  # the last ones stay known until workers are back
                fleet = replace(fleet, adapters=self._peers.fleet.adapters)
            self._peers.fleet = fleet
            if not self._peers.scheduler_connected:
                self._on_connected(now_s)
            return
        request = event.request
        live = self._table.get(request.request_id)
        if live is not None and request.HasField("forecast_update"):
            self._on_forecast(live, request.forecast_update, now_s)
        elif live is not None and request.HasField("length_bound"):
            _reserve(live, request.length_bound.output_tokens, now_s)
        elif live is None and request.HasField("placed"):
            self._submitter.cancel_unknown(request.request_id)
        elif live is not None:
            announced, live.submission.announced = live.submission.announced, False
            self._on_request_event(live, request, announced, now_s)

    def _on_connected(self, now_s: float) -> None:
        """A new stream to a scheduler that may have restarted: announces choices that still run,
        resubmits the others, and submits those that wait."""
        self._peers.scheduler_connected = True
        waiting = self._table.waiting()
        for live in self._table.submitted():
            if not self._peers.holds(live.submission):
                self._recovery.resubmit(live, ResubmitCause.SCHEDULER, now_s)
            elif live.submission.pending_end is None:
                self._metrics.announcements.inc()
                self._submitter.announce(live, now_s)
        for live in waiting:
            self._submitter.submit(live, now_s)

    def _on_forecast(
        self, live: LiveChoice, update: scheduler_pb2.ForecastUpdate, now_s: float
    ) -> None:
        if tracker := live.session.forecast_tracker:
            try:
                tracker.update(messages.read_forecast(update))
            except InvalidArgument as error:  # advice: the request does not depend on it
                log.warning("a forecast is left out: %s", error)
                return
            if tracker.is_news:
                live.call.notify(live.session, now_s)

    def _on_request_event(
        self, live: LiveChoice, event: scheduler_pb2.RequestEvent, announced: bool, now_s: float
    ) -> None:
        timeline, submission = live.session.timeline, live.submission
        match event.WhichOneof("kind"):
            case "placed":
                self._on_placed(live, event.placed, announced, now_s)
            case "preempted":
                timeline.on_preempted()
                submission.running = False
            case "resumed":
                if not submission.running:
                    timeline.on_resumed(event.resumed.held_tokens > 0, now_s)
                submission.running = True
            case "rejected":
                timeline.rejected = True
                drain_s = self._peers.fleet.drain_left_s(now_s)
                refusal = messages.read_rejection(event.rejected, drain_s)
                self._table.end(live, FinishReason.ERROR, now_s, refusal)
            case "finished":
                self._on_finished(live, event.finished, now_s)

    def _on_placed(
        self, live: LiveChoice, placed: scheduler_pb2.Placed, announced: bool, now_s: float
    ) -> None:
        submission, address = live.submission, placed.worker_address
        continues = (
            announced
            and submission.running
            and submission.address == address
            and self._peers.holds(submission)
        )
        submission.worker_id, submission.address = placed.worker_id, address
        submission.running = True
        timeline = live.session.timeline
        timeline.placed_s = min(timeline.placed_s, now_s)
        if live.call.grant is not None:
            live.call.grant.start(live.session.index, now_s)
        if not continues:
            submission.prompted = self._send(address, _prompt_message(live))

    def _on_finished(
        self, live: LiveChoice, finished: scheduler_pb2.Finished, now_s: float
    ) -> None:
        reason = decode_reason(finished.reason) or FinishReason.ERROR
        if reason in (FinishReason.STOP, FinishReason.LENGTH):  # tokens may be on their way
            live.submission.pending_end = PendingEnd(finished.output_tokens, reason)
        elif reason is FinishReason.DEADLINE:
            self._table.end(live, reason, now_s)
        else:
            message = finished.message or f"the request ended with {reason.value}"
            code = Code.INTERNAL if reason is FinishReason.ERROR else Code.UNAVAILABLE
            failure = ServiceError(code, message)
            if reason is FinishReason.ERROR:  # the worker's reason may be on its way
                end = PendingEnd(finished.output_tokens, reason, failure)
                live.submission.pending_end = end
            else:
                self._table.end(live, reason, now_s, failure)

    # The workers' streams

    def on_worker_stream(self, address: str, now_s: float) -> list[worker_pb2.WorkerInput]:
        """A new stream to the worker opens; returns the prompts to send first. A choice prompted
        on an earlier stream may have lost tokens and is resubmitted."""
        self._peers.open_streams.add(address)
        for live in self._table.placed_at(address):
            if live.submission.prompted:
                self._recovery.resubmit(live, ResubmitCause.WORKER, now_s)
        waiting = self._table.placed_at(address)
        for live in waiting:
            live.submission.prompted = True
        return [_prompt_message(live) for live in waiting]

    def on_worker_lost(self, address: str) -> None:
        """The stream has ended. Its choices wait for the next stream, or for the scheduler to
        place them elsewhere."""
        self._peers.open_streams.discard(address)


def _reserve(live: LiveChoice, output_tokens: int, now_s: float) -> None:
    """Reserves what the choice is forecast to need of its key's limits."""
    if live.call.grant is not None:
        most = max(output_tokens, len(live.session.output))
        needed = live.request.tokens_needed(live.choice, most)
        live.call.grant.expect(live.session.index, needed, now_s)


def _prompt_message(live: LiveChoice) -> worker_pb2.WorkerInput:
    session = live.session
    scored = bool(session.prompt_logprobs)
    return messages.prompt(
        live.submission.wire_id, live.request, live.choice, session.output, scored
    )
