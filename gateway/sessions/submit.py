"""Submission of choices to the scheduler."""

from collections.abc import Callable

from gateway.peers import messages
from gateway.sessions.call import LiveChoice
from gateway.sessions.table import SessionTable
from protos.generated import scheduler_pb2
from services.core import FinishReason

SendToScheduler = Callable[[scheduler_pb2.SubmitMessage], object]


class Submitter:
    """Tells the scheduler of each choice: that it is new, continues, or is over."""

    def __init__(self, table: SessionTable, send: SendToScheduler, reserve_quantile: float):
        """`reserve_quantile`: of the forecasts by which tokens are reserved."""
        self._table, self._send = table, send
        self._reserve_quantile = reserve_quantile

    def submit(self, live: LiveChoice, now_s: float) -> None:
        """Submits under a new id, with the output tokens so far."""
        self._table.begin_submission(live)
        self._send_request(live, now_s)

    def announce(self, live: LiveChoice, now_s: float) -> None:
        """Tells a scheduler that may have restarted of a choice that its worker still runs."""
        live.submission.announced = True
        self._send_request(live, now_s, live.submission.worker_id)

    def cancel(self, live: LiveChoice, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """Tells the scheduler, if it knows the choice, that the choice must not continue."""
        if live.submission.wire_id:
            output_tokens = len(live.session.output)
            self._send(messages.cancel(live.submission.wire_id, reason, output_tokens))

    def cancel_unknown(self, wire_id: str) -> None:
        """Tells the scheduler that a request it continues has no client."""
        self._send(messages.cancel(wire_id, FinishReason.CANCELLED, 0))

    def _send_request(self, live: LiveChoice, now_s: float, worker_id: str = "") -> None:
        delivered, grant = len(live.session.output), live.call.grant
        reserves = grant is not None and grant.counts_tokens
        self._send(
            messages.new_request(
                live.submission.wire_id,
                live.request,
                delivered,
                now_s,
                worker_id,
                live.prefix_hashes,
                self._reserve_quantile if reserves else 0.0,
            )
        )
