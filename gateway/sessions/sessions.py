"""The life of every request in the gateway: open, submit, place, deliver, recover, end.

The session table holds the live choices. Four handlers act on it:

    client → Sessions.open → Submitter ───→ scheduler
             PlacementHandler ←── events ── scheduler; prompts → workers
             DeliveryHandler ←─── tokens ── workers; chunks → client
             Recovery ←────────── losses, and waits that the sweep bounds

None of them does I/O: messages leave through the two `send` functions and arrive through
`on_event` and `on_tokens`. All run on one event loop.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from math import inf
from uuid import uuid4

from gateway.admission.key_limits import Grant
from gateway.admission.retry_budget import RetryBudget
from gateway.config import GatewayConfig
from gateway.metrics import Metrics
from gateway.requests.text import Text
from gateway.sessions.call import ClientCall, LiveChoice
from gateway.sessions.delivery import DeliveryHandler
from gateway.sessions.event_pace import EventPace
from gateway.sessions.forecast_tracker import ForecastTracker
from gateway.sessions.outcome_history import OutcomeHistory
from gateway.sessions.placement import PlacementHandler, SendToWorker
from gateway.sessions.reasoning_budget import ReasoningBudget
from gateway.sessions.recovery import Recovery
from gateway.sessions.session import Session
from gateway.sessions.submit import SendToScheduler, Submitter
from gateway.sessions.table import PeerState, SessionTable
from gateway.sessions.ttft_promises import TtftPromises
from gateway.types.generation import GenerationRequest

MAX_ADAPTERS_SHOWN = 64  # in one label of a metric


class Sessions:
    """The session table with its handlers, and the entry for new requests."""

    def __init__(
        self,
        config: GatewayConfig,
        text: Text,
        metrics: Metrics,
        to_scheduler: SendToScheduler,
        to_worker: SendToWorker,
        pace: EventPace,
        live: Callable[[], int],
    ):
        """`pace` is that of all `live()` choices of the process."""
        self.table, self.peers = table, peers = SessionTable(), PeerState(config.model_name)
        self._text, self._metrics = text, metrics
        self._retries = RetryBudget(config.retry_share, config.retry_floor_per_s)
        self._promises = TtftPromises()
        self._submitter = submitter = Submitter(table, to_scheduler, config.key_reserve_quantile)
        self.recovery = Recovery(config, table, peers, submitter, self._retries, metrics)
        self.placement = PlacementHandler(
            table, peers, submitter, self.recovery, metrics, to_worker
        )
        history = OutcomeHistory(config.verdicts_kept)
        self.delivery = DeliveryHandler(
            history, table, peers, submitter, self.recovery, metrics, pace, live
        )
        running = table.count_running
        metrics.watch(running, lambda: len(table) - running(), self._adapter_info)

    @property
    def worker_addresses(self) -> set[str]:
        """Workers that are in the fleet or still hold a choice."""
        return self.table.worker_addresses().union(self.peers.fleet.addresses)

    def _adapter_info(self) -> Mapping[tuple[str, ...], float]:
        """The adapters of requests, as labels of the metric that endpoint pickers read."""
        loaded = self.peers.fleet.adapters
        if not loaded:
            return {}
        running, waiting = (
            ",".join(sorted(self.table.adapters(runs))[:MAX_ADAPTERS_SHOWN])
            for runs in (True, False)
        )
        return {(str(len(loaded)), running, waiting): time.time()}

    def open(
        self,
        requests: Sequence[GenerationRequest],
        whole: bool = False,
        grant: Grant | None = None,
    ) -> ClientCall:
        """Submits every choice of every request. The call settles its grant.

        The caller iterates the call's chunks or closes it. With `whole`, it closes it in any case.
        """
        now_s = time.monotonic()
        client_id = next((request.client.request_id for request in requests), "")
        call = ClientCall(_unique_id(client_id), int(time.time()), self.delivery, whole, client_id)
        call.grant = grant
        for request in requests:
            self._metrics.prompt_tokens.inc(request.prompt_tokens)
            hashes = self.peers.fleet.prefix_hashes(request)
            for choice in range(request.sampling.n):
                session = self._make_session(len(call.choices), request)
                call.choices.append(LiveChoice(session, request, choice, call, hashes))
        for live in call.choices:
            self._retries.on_submitted(now_s)
            self.table.add(live)
            if self.peers.scheduler_connected:
                self._submitter.submit(live, now_s)
        deadline_s = min((request.deadline_s for request in requests), default=inf)
        if deadline_s < inf:
            call.limit(deadline_s, self.recovery.end_at_deadline)
        return call

    def _make_session(self, index: int, request: GenerationRequest) -> Session:
        sampling, tracker = request.sampling, None
        if request.client.include_forecast:
            tracker = ForecastTracker(
                request.sla, sampling.max_tokens, request.arrival_s, self._promises
            )
        detokenizer, limit = self._text.detokenizer(sampling), request.reasoning_limit
        budget = ReasoningBudget(limit, self._text.detokenizer(sampling)) if limit else None
        return Session(index, sampling, request.arrival_s, detokenizer, tracker, budget)


def _unique_id(client_id: str) -> str:
    """A unique id that begins with the client's, which may be repeated."""
    return f"{client_id}.{uuid4().hex[:16]}" if client_id else uuid4().hex
