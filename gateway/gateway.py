"""The gateway of one model: assembles its intake, sessions and peer streams."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from grpc import aio
from prometheus_client import CollectorRegistry

from gateway.admission.audit_log import AuditLog
from gateway.admission.caller import current_caller
from gateway.admission.key_limits import KeyLimiter
from gateway.admission.reservations import Reservations
from gateway.admission.tokenization_queue import TokenizationQueue
from gateway.config import GatewayConfig
from gateway.intake import RequestIntake
from gateway.metrics import Metrics
from gateway.peers.scheduler_queries import SchedulerQueries
from gateway.request_tracing import NO_TRACE, RequestTrace
from gateway.requests.reading_pool import ReadingPool
from gateway.requests.text import Text
from gateway.sessions.call import ClientCall
from gateway.sessions.event_pace import EventPace
from gateway.sessions.sessions import Sessions
from gateway.sessions.sla_window import SlaWindow
from gateway.streams import PeerStreams
from gateway.types.generation import GenerationRequest
from observability.exposition import Part
from observability.logs import add_log_context
from protos.generated import scheduler_pb2

SWEEP_INTERVAL_S = 0.1


@dataclass(frozen=True)
class Shared:
    """What the models of a process share, so that its limits hold for all of them together."""

    queue: TokenizationQueue
    reading: ReadingPool
    pace: EventPace
    keys: KeyLimiter
    reservations: Reservations  # of `keys`
    audit: AuditLog | None
    live: Callable[[], int]  # choices of all models, which `pace` serves


class Gateway:
    """Serves the requests of one model while `run` runs.

    The faces read requests with `intake`, open calls with `open`, and send the calls' chunks.
    `scheduler` and the channels of `connect` may be in this process or over sockets. Raises
    ConfigError if the model's tokenizer cannot be loaded.
    """

    def __init__(
        self,
        config: GatewayConfig,
        scheduler: aio.Channel,
        connect: Callable[[str], aio.Channel],
        registry: CollectorRegistry,
        shared: Shared,
    ):
        self.config, self._audit = config, shared.audit
        self.text = Text(config.model, config.chat_template)
        self.metrics = Metrics(registry, config.slas)
        self.metrics.watch_limits(lambda: shared.reservations.shared)
        self.part = Part(registry, config.metric_labels)
        self._queries = SchedulerQueries(scheduler)
        self._streams = PeerStreams(
            config, scheduler, connect, self.text.all_tokens, self.metrics.invalid
        )
        self.sessions = Sessions(
            config,
            self.text,
            self.metrics,
            self._streams.send_to_scheduler,
            self._streams.send_to_worker,
            shared.pace,
            shared.live,
        )
        self.intake = RequestIntake(
            config,
            self.text,
            self.sessions,
            self.metrics,
            shared.queue,
            shared.reading,
            shared.keys,
            shared.reservations,
            shared.audit,
        )

    # Lifecycle

    async def run(self) -> None:
        """Keeps the streams to the scheduler and the workers open, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._streams.run(self.sessions, self.intake))
            group.create_task(self.intake.grammars.run())
            group.create_task(self._sweep())

    async def drain(self) -> None:
        """Refuses new requests and returns when the last live one has ended."""
        self.intake.draining = True
        await self.sessions.table.wait_until_empty()

    @property
    def draining(self) -> bool:
        return self.intake.draining

    @property
    def ready(self) -> bool:
        """Whether requests are accepted and a worker can run them."""
        return not self.obstacle

    @property
    def obstacle(self) -> str:
        """Why requests cannot run now; empty if they can."""
        peers = self.sessions.peers
        if self.draining:
            return "draining"
        if peers.fleet.other_models and not peers.fleet.addresses:
            served = ", ".join(sorted(peers.fleet.other_models))
            return f"the scheduler has no worker of this model, only of {served}"
        if not (peers.scheduler_connected and peers.fleet.context_limit):
            return "no worker is attached"
        return ""

    @property
    def warnings(self) -> Sequence[str]:
        """What does not work, although requests are served."""
        return self.sessions.peers.fleet.warnings

    # Requests

    async def open(
        self,
        requests: Sequence[GenerationRequest],
        whole: bool = False,
        trace: RequestTrace = NO_TRACE,
    ) -> ClientCall:
        """Submits parsed requests. The caller iterates the call's chunks or closes it; with
        `whole`, it closes it in any case. Raises ServiceError."""
        grant = await self.intake.reserve(requests)
        try:
            self.intake.check_requests(requests)
            call = self.sessions.open(requests, whole, grant)
        except BaseException:
            if grant is not None:
                grant.cancel(time.monotonic())
            raise
        if (audit := self._audit) is not None:
            caller = current_caller()
            call.on_closed = lambda closed: audit.write(caller, closed.account)
        add_log_context(request_id=call.request_id)
        trace.on_opened(call, requests)
        return call

    # State

    @property
    def max_context_tokens(self) -> int:
        return self.intake.context_limit.tokens

    @property
    def adapters(self) -> Mapping[str, str]:
        """The folder of each LoRA adapter that requests may name as their model, by name."""
        return self.sessions.peers.fleet.adapters or {}

    @property
    def knows_adapters(self) -> bool:
        """Whether a worker has been attached since the start. The adapters stay known while the
        scheduler or all workers are away."""
        return self.sessions.peers.fleet.adapters is not None

    async def load_adapter(self, name: str, path: str) -> None:
        """Makes all workers of the model hold an adapter. Raises ServiceError."""
        await self._queries.load_adapter(self.config.model_name, name, path)

    async def unload_adapter(self, name: str) -> None:
        """Refuses further requests with an adapter. Raises ServiceError."""
        await self._queries.unload_adapter(self.config.model_name, name)

    @property
    def live(self) -> int:
        """Choices being answered."""
        return len(self.sessions.table)

    @property
    def arriving(self) -> int:
        """Requests that wait for tokenization."""
        return self.intake.waiting

    @property
    def sla_window(self) -> SlaWindow:
        """SLA outcomes of the last minute."""
        return self.sessions.delivery.history.sla_window

    async def why(self, request_id: str) -> scheduler_pb2.WhyResponse:
        """A request's stories, each with the SLA verdict as its client saw it. Raises
        ServiceError."""
        response = await self._queries.get_stories(request_id)
        for story in response.stories:
            self.sessions.delivery.history.add_verdict(story)
        return response

    async def get_fleet(self) -> scheduler_pb2.FleetView:
        """Workers and queue as of now. Raises ServiceError."""
        return await self._queries.get_fleet()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_INTERVAL_S)
            self.sessions.recovery.sweep(time.monotonic(), self._streams.scheduler_lost_s())
