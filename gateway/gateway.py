"""The gateway as one object, which both its faces call. It alone reads the clock."""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import inf
from typing import TypeVar, cast
from uuid import uuid4

from grpc import aio
from prometheus_client import CollectorRegistry

from gateway.admission.caller import caller
from gateway.admission.door import Refused
from gateway.admission.keyring import Keyring
from gateway.admission.turnstile import Turnstile
from gateway.config import GatewayConfig
from gateway.observed.metrics import Metrics
from gateway.observed.traces import NO_TRACE, Trace, Traces
from gateway.peers import messages
from gateway.peers.links import Dial, Link, WorkerLinks
from gateway.peers.scrapes import Scrapes
from gateway.pipeline import Pipeline
from gateway.requests.client_request import ClientRequest, count_prompt_bytes
from gateway.requests.defaults import sampling_defaults
from gateway.requests.parser import Clock, Generation, Parser
from gateway.requests.reading_pool import LARGE_BYTES, ReadingPool
from gateway.requests.size import PromptSizeLimit
from gateway.requests.text import Text
from gateway.requests.unknown import UnknownFields
from gateway.sessions.call import ClientCall
from gateway.sessions.recent import Recent
from observability.exposition import Part
from observability.logs import about
from observability.tracing import NO_SPANS, Spans
from protos.generated import scheduler_pb2, worker_pb2
from protos.generated.scheduler_pb2_grpc import SchedulerStub
from protos.generated.worker_pb2_grpc import WorkerStub
from services.runtime.backoff import Backoff
from services.runtime.errors import Code, ServiceError
from services.runtime.observed.tracing import outgoing
from services.sla import SlaMissCause

SWEEP_S = 0.1
WHY_S = 10.0  # what a scheduler gets to tell a story
FLEET_S = 2.0  # and to tell of its fleet

T = TypeVar("T")
SchedulerLink = Link[scheduler_pb2.SubmitMessage, scheduler_pb2.SchedulerEvent]
WorkerLink = Link[worker_pb2.WorkerInput, worker_pb2.TokenBatch]

SchedulerDial = Dial[scheduler_pb2.SubmitMessage, scheduler_pb2.SchedulerEvent]
WorkerDial = Dial[worker_pb2.WorkerInput, worker_pb2.TokenBatch]


class Gateway:
    """Takes requests over gRPC by `service`, and over HTTP by `http.app`; serves while `run`
    runs.

    `scheduler` and what `connect` returns may be channels in this process or over sockets. Raises
    ConfigError when the model's tokenizer cannot be loaded. `beside`: what else its process counts.
    """

    def __init__(
        self,
        config: GatewayConfig,
        scheduler: aio.Channel,
        connect: Callable[[str], aio.Channel],
        registry: CollectorRegistry,
        beside: Sequence[Part] = (),
        spans: Spans = NO_SPANS,
    ):
        self.config = config
        self.keyring = Keyring(config.api_keys, config.api_key_file)
        self.traces = Traces(spans, config.model_name)
        self.text = Text(config.model, config.chat_template)
        self.metrics = Metrics(registry, config.slas)
        self.parts = (Part(registry, config.metric_labels), *beside)
        self.scrapes = Scrapes(config, self.parts, connect, self.metrics.peers_missing)
        self.unknown_fields = UnknownFields(config.unknown_fields == "refuse")
        self.draining = False
        self._connect = connect
        defaults = sampling_defaults(config.model) if config.generation_config == "auto" else {}
        self._parser = Parser(config, self.text, lambda: secrets.randbits(63), defaults)
        self._size_limit = PromptSizeLimit(self.text.backend)
        self._reading = ReadingPool(
            config.reading_threads, config.max_reading, config.max_reading_bytes
        )
        self._gateway_id = config.gateway_id or uuid4().hex
        self._backoff = Backoff(config.connect_backoff_s, config.max_connect_backoff_s)
        self._stub = SchedulerStub(scheduler)
        self._scheduler = self._scheduler_link(self._stub)
        self._workers = WorkerLinks(self._worker_link)
        self._turnstile = Turnstile(
            config.max_arriving, config.arriving_hold_s, config.arriving_burst_s
        )
        self._pipeline = Pipeline(
            config, self.text, self.metrics, self._scheduler.send, self._workers.send
        )

    # Life

    async def run(self) -> None:
        """Keeps the streams to scheduler and workers, until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                self._workers.serve_in(group)
                group.create_task(self._scheduler.run())
                group.create_task(self._sweep())
        finally:
            self._workers.serve_in(None)
            self._reading.close()
            await self.scrapes.close()

    async def drain(self) -> None:
        """Refuse new requests, and return when the last live one is over."""
        self.draining = True
        await self._pipeline.wait_idle()

    @property
    def ready(self) -> bool:
        """Whether a request would be taken and there is a worker to run it."""
        pipeline = self._pipeline
        return not self.draining and pipeline.connected and pipeline.fleet.reach is not None

    @property
    def max_context_tokens(self) -> int:
        return self._pipeline.fleet.reach_or(self.text.context_tokens).tokens

    @property
    def live(self) -> int:
        """Choices being answered."""
        return self._pipeline.live

    @property
    def arriving(self) -> int:
        """Requests that wait for tokenization."""
        return self._turnstile.waiting + self._reading.waiting

    # The request path, shared by gRPC and HTTP

    def admit(self, timeout_s: float = inf, choices: int = 1, sla_class: str = "") -> Clock:
        """A request is at the door, of which nothing else was read yet; its time runs from here.
        Raises ServiceError where it can be told by now that it would be refused. O(1)."""
        now_s = time.monotonic()
        self._check_draining()
        timeout_s = min(timeout_s, self.config.default_deadline_s)
        clock = Clock(now_s, timeout_s, sla_class)
        with self._counting_refusals(sla_class, choices):
            self._turnstile.check()
        self.check_room(choices, clock)
        return clock

    def check_room(self, choices: int, clock: Clock) -> None:
        """Raises ServiceError when so many choices would be refused now. O(1)."""
        now_s = time.monotonic()
        with self._counting_refusals(clock.sla_class, choices):
            self._pipeline.check_room(choices, clock.arrival_s + clock.timeout_s - now_s, now_s)

    async def take_turn(self, sla_class: str = "") -> None:
        """Until tokens that wait to be read leave time for a new request. Raises ServiceError."""
        with self._counting_refusals(sla_class):
            await self._turnstile.enter()

    async def parse(
        self, request: ClientRequest, clock: Clock, trace: Trace = NO_TRACE
    ) -> Generation:
        """Raises ServiceError; for a client's mistake InvalidArgument, naming the field."""
        since_s = time.monotonic()
        reach = self._pipeline.fleet.reach_or(self.text.context_tokens)
        size_bytes = count_prompt_bytes(request.prompt)
        self._size_limit.check(request, size_bytes, reach)
        parsing = partial(self._parser.parse, request, reach, clock)
        generation = await self.read(parsing, size_bytes, clock.sla_class)
        if owner := caller().key:
            generation = replace(generation, user=generation.user or owner)
        if trace is NO_TRACE:
            return generation
        trace.tokenized(since_s, generation.prompt_tokens)
        return replace(generation, traceparent=trace.traceparent)

    def reads_at_once(self, size_bytes: int) -> bool:
        """Whether texts of so many bytes are read before their client can think of leaving."""
        return size_bytes <= LARGE_BYTES and self._reading.free

    async def read(self, work: Callable[[], T], size_bytes: int, sla_class: str = "") -> T:
        """What `work` makes of a text of so many bytes, in a thread unless the config has it read
        at once. Raises ServiceError."""
        if size_bytes <= self.config.read_at_once_bytes:
            return work()
        with self._counting_refusals(sla_class):
            return await self._reading.run(work, size_bytes)

    async def tokenize(self, request: ClientRequest) -> Sequence[int]:
        """The tokens of its prompt or conversation, however many. Raises ServiceError."""
        size_bytes = count_prompt_bytes(request.prompt)
        return await self.read(partial(self._parser.tokenize, request), size_bytes)

    def check_model(self, name: str) -> None:
        self._parser.check_model(name)

    def open(
        self, generations: Sequence[Generation], whole: bool = False, trace: Trace = NO_TRACE
    ) -> ClientCall:
        """Start answering; iterate the call's chunks, or close it. One whose answer is sent `whole`
        must be closed. Raises ServiceError."""
        self._check_draining()
        choices = sum(generation.sampling.n for generation in generations)
        with self._counting_refusals(generations[0].sla.name, choices):
            call = self._pipeline.open(generations, whole)
        about(request_id=call.request_id)
        trace.opened(call, generations)
        return call

    def _check_draining(self) -> None:
        if self.draining:
            raise ServiceError(Code.UNAVAILABLE, "shutting down; retry elsewhere", 1.0)

    @contextmanager
    def _counting_refusals(self, sla_class: str, choices: int = 1) -> Iterator[None]:
        try:
            yield
        except Refused as refusal:
            name = self.metrics.known(sla_class or self.config.default_sla)
            self.metrics.on_refused(refusal.bar, name, choices)
            self.recent.add(name, SlaMissCause.REJECTED, 0, time.monotonic(), choices)
            raise

    # What it tells of itself and of the scheduler

    @property
    def recent(self) -> Recent:
        """How the SLAs of the last minute were kept here."""
        return self._pipeline.verdicts.recent

    async def why(self, request_id: str) -> scheduler_pb2.WhyResponse:
        """A request's stories, each with the verdict by what its client was sent. Raises
        ServiceError."""
        with _refused_by_the_scheduler():
            response = await self._stub.Why(
                scheduler_pb2.WhyRequest(request_id=request_id),
                timeout=WHY_S,
                metadata=outgoing(),
            )
        for story in response.stories:
            self._pipeline.verdicts.judge(story)
        return response

    async def ask_fleet(self) -> scheduler_pb2.FleetView:
        """Workers and queue as the scheduler has them now; it tells by itself only of what
        matters to requests. Raises ServiceError."""
        with _refused_by_the_scheduler():
            return await self._stub.GetFleet(scheduler_pb2.GetFleetRequest(), timeout=FLEET_S)

    # Streams to the others

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            now_s = time.monotonic()
            self._pipeline.sweep(now_s, self._scheduler.lost_s(now_s))

    def _scheduler_link(self, stub: SchedulerStub) -> SchedulerLink:
        def on_open() -> list[scheduler_pb2.SubmitMessage]:
            return [messages.submit_hello(self._gateway_id)]

        def on_event(event: scheduler_pb2.SchedulerEvent) -> None:
            self._pipeline.on_event(event)
            if event.WhichOneof("kind") == "fleet":
                self._workers.keep_only(self._pipeline.addresses)

        limit = 4 * self.config.max_sessions + 1  # a request and a cancel, twice over
        return Link(
            "the scheduler",
            cast(SchedulerDial, stub.Submit),
            on_open,
            on_event,
            lambda: self._pipeline.on_scheduler_lost(),
            self._backoff,
            limit,
        )

    def _worker_link(self, address: str) -> WorkerLink:
        def on_open() -> list[worker_pb2.WorkerInput]:
            hello = messages.worker_hello(self._gateway_id)
            return [hello, *self._pipeline.on_worker_stream(address)]

        def on_tokens(batch: worker_pb2.TokenBatch) -> None:
            self._turnstile.on_tokens()
            self._pipeline.on_tokens(address, batch)

        channel = self._connect(address)
        return Link(
            f"worker {address}",
            cast(WorkerDial, WorkerStub(channel).Stream),
            on_open,
            on_tokens,
            lambda: self._pipeline.on_worker_lost(address),
            self._backoff,
            4 * self.config.max_sessions + 1,
            cast(Callable[[], Awaitable[None]], channel.close),
        )


@contextmanager
def _refused_by_the_scheduler() -> Iterator[None]:
    """What it answers instead, as ours."""
    try:
        yield
    except aio.AioRpcError as error:
        raise ServiceError(error.code(), error.details() or error.code().name) from None
