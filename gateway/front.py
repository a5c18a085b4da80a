"""The front of a process: the gateways of its models, and what they share. All faces call it."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from math import inf

from grpc import aio
from prometheus_client import CollectorRegistry

from gateway.admission.audit_log import AuditLog
from gateway.admission.key_limits import KeyLimiter
from gateway.admission.keyring import Keyring
from gateway.admission.reservations import open_reservations
from gateway.admission.tokenization_queue import TokenizationQueue
from gateway.background import BackgroundTasks
from gateway.config import MAX_NAME_CHARS, GatewayConfig
from gateway.embeddings.text_encoder import EncoderLimits, TextEncoder
from gateway.gateway import Gateway, Shared
from gateway.peers.metrics_aggregator import MetricsAggregator
from gateway.request_tracing import RequestTracer
from gateway.requests.reading_pool import ReadingPool
from gateway.requests.unknown import UnknownFields
from gateway.sessions.event_pace import EventPace
from gateway.sessions.table import SessionTable
from gateway.types.errors import AdaptersUnknown, UnknownModel
from gateway.types.generation import RequestArrival
from observability.exposition import Part
from observability.tracing import NO_SPANS, Spans
from protos.generated import scheduler_pb2
from services.runtime.errors import Code, ServiceError

Connect = Callable[[str], aio.Channel]


class Front:
    """One gateway for each served model, by the model's name. Serves while `run` runs.

    Keys, the event loop's time, threads and connections are of the process and shared by all
    models. Live requests, the streams to the peers and metrics are of a model. The first model is
    that of requests without a name; what is refused before its model is known counts to it, too.
    """

    def __init__(
        self,
        config: GatewayConfig,
        reach_scheduler: Connect,
        reach_worker: Connect,
        reach_service: Connect,
        other_parts: Sequence[Part] = (),
        spans: Spans = NO_SPANS,
    ):
        """`reach_scheduler`, `reach_worker` and, for metrics, `reach_service` open the channel to
        an address; it may stay in this process. `other_parts` are further metrics of the process.
        Raises ConfigError if a model's tokenizer cannot be loaded, and for an unusable URL."""
        self.config = config
        self._started_s = time.monotonic()
        self.keyring = Keyring(config.api_keys, config.api_key_file)
        self.unknown_fields = UnknownFields(config.unknown_fields == "refuse")
        self.background = BackgroundTasks(config.max_background)
        tables: list[SessionTable] = []  # of every model
        keys = KeyLimiter(config.key_limits, max(1, config.replicas))
        self._reservations = open_reservations(config, keys)
        self._shared = Shared(
            TokenizationQueue(
                config.max_arriving,
                config.arriving_hold_s,
                config.arriving_burst_s,
                config.max_arriving_s,
            ),
            ReadingPool(config.reading_threads, config.max_reading, config.max_reading_bytes),
            EventPace(config.max_messages_per_s, config.max_pause_s),
            keys,
            self._reservations,
            AuditLog.open(config),
            lambda: sum(map(len, tables)),
        )
        self.gateways: Mapping[str, Gateway] = {
            each.model_name: Gateway(
                each,
                reach_scheduler(each.scheduler_address),
                reach_worker,
                CollectorRegistry(),
                self._shared,
            )
            for each in config.per_model()
        }
        tables += (each.sessions.table for each in self.gateways.values())
        self.first = next(iter(self.gateways.values()))
        self.text_encoder: TextEncoder | None = None
        if config.embeddings:
            limits = EncoderLimits(
                config.max_embeddings_waiting, config.embedding_wait_s, config.embedding_threads
            )
            self.text_encoder = TextEncoder(config.embedding_model, limits)
        self.tracer = RequestTracer(spans, self.first.config.model_name)
        self.own_parts = [gateway.part for gateway in self.gateways.values()]
        self.parts = (*self.own_parts, *other_parts)
        missing = [gateway.metrics.peers_missing for gateway in self.gateways.values()]
        self.aggregator = MetricsAggregator(config, self.parts, reach_service, missing)

    # Lifecycle

    async def run(self) -> None:
        """Keeps the streams of every model open, until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                for gateway in self.gateways.values():
                    group.create_task(gateway.run())
                group.create_task(self.background.run())
                group.create_task(self._reservations.run())
        finally:
            self._shared.reading.close()
            if self._shared.audit is not None:
                self._shared.audit.close()
            if self.text_encoder is not None:
                await self.text_encoder.close()
            await self.aggregator.close()

    async def drain(self) -> None:
        """Refuses new requests and returns when the last live one has ended."""
        await asyncio.gather(*(gateway.drain() for gateway in self.gateways.values()))

    @property
    def ready(self) -> bool:
        """Whether a model accepts requests. One without workers does not take the others away from
        their clients."""
        return any(gateway.ready for gateway in self.gateways.values())

    # Requests

    def select(self, name: str) -> Gateway:
        """The gateway of a model, or of an adapter's base model; of the first one for an empty
        name. Raises UnknownModel, or AdaptersUnknown while a model has had no worker, for up to
        `adapters_wait_s` from the start: its adapters are not known yet. O(models)."""
        if not name:
            return self.first
        if name in self.gateways:
            return self.gateways[name]
        for gateway in self.gateways.values():
            if name in gateway.adapters:
                return gateway
        adapters = (each for gateway in self.gateways.values() for each in gateway.adapters)
        shown, known = name[:MAX_NAME_CHARS], ", ".join((*self.gateways, *adapters))
        waiting = [each for each, gateway in self.gateways.items() if not gateway.knows_adapters]
        if waiting and time.monotonic() - self._started_s < self.config.adapters_wait_s:
            raise AdaptersUnknown(shown, known, ", ".join(waiting))
        raise UnknownModel(shown, known)

    def admit(
        self, timeout_s: float = inf, sla_class: str = "", arrival_s: float | None = None
    ) -> RequestArrival:
        """Admits a request of which nothing else has been read, not even its model: it is refused
        if each model would refuse it. Its time runs from `arrival_s`; None: from here. Raises
        ServiceError. O(models)."""
        gateways = self.gateways.values()
        admitting = (each for each in gateways if each.intake.has_room(timeout_s))
        intake = next(admitting, self.first).intake
        return intake.admit(timeout_s, sla_class=sla_class, arrival_s=arrival_s)

    # State

    @property
    def live(self) -> int:
        """Choices being answered."""
        return self._shared.live()

    async def why(self, request_id: str) -> scheduler_pb2.WhyResponse:
        """A request's stories, of every model that knows its id. Raises ServiceError: NOT_FOUND
        only if all schedulers have answered."""
        answers = await asyncio.gather(
            *(_stories_or_error(gateway, request_id) for gateway in self.gateways.values())
        )
        found = [answer for answer in answers if isinstance(answer, scheduler_pb2.WhyResponse)]
        if not found:
            errors = [answer for answer in answers if isinstance(answer, ServiceError)]
            raise min(errors, key=lambda error: error.code is Code.NOT_FOUND)
        return scheduler_pb2.WhyResponse(
            stories=[story for each in found for story in each.stories]
        )


async def _stories_or_error(
    gateway: Gateway, request_id: str
) -> scheduler_pb2.WhyResponse | ServiceError:
    try:
        return await gateway.why(request_id)
    except ServiceError as error:
        return error
