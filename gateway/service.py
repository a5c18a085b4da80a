"""The gateway as one object, and its gRPC face: parse, call, encode. It alone reads the clock."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from math import inf
from typing import Any, cast
from uuid import uuid4

import grpc
from google.protobuf.message import DecodeError
from grpc import aio
from prometheus_client import CollectorRegistry

from gateway.admission.door import Refused
from gateway.admission.turnstile import Turnstile
from gateway.config import GatewayConfig
from gateway.metrics import Metrics
from gateway.peers import messages
from gateway.peers.links import Dial, Link, WorkerLinks
from gateway.pipeline import Pipeline
from gateway.requests.defaults import sampling_defaults
from gateway.requests.parser import Clock, Generation, Parser, check_timeout
from gateway.requests.text import Text
from gateway.sessions.call import ClientCall
from gateway.sessions.session import ChoiceChunk
from protos import gateway_pb2, gateway_pb2_grpc, scheduler_pb2, worker_pb2
from protos.scheduler_pb2_grpc import SchedulerStub
from protos.worker_pb2_grpc import WorkerStub
from services.runtime.backoff import Backoff
from services.runtime.codec import encode_reason
from services.runtime.errors import Code, InvalidArgument, ServiceError
from services.runtime.server import Mount

SWEEP_S = 0.1
WHY_S = 10.0  # what a scheduler gets to tell a story
DEADLINE_MARGIN_S = 0.05  # of a gRPC deadline, so that the answer so far still arrives
SERVICE_NAME = "foretoken.v1.Gateway"
TIMEOUT_KEY = "x-request-timeout-s"

SchedulerLink = Link[scheduler_pb2.SubmitMessage, scheduler_pb2.SchedulerEvent]
WorkerLink = Link[worker_pb2.WorkerInput, worker_pb2.TokenBatch]

SchedulerDial = Dial[scheduler_pb2.SubmitMessage, scheduler_pb2.SchedulerEvent]
WorkerDial = Dial[worker_pb2.WorkerInput, worker_pb2.TokenBatch]


class GatewayService(gateway_pb2_grpc.GatewayServicer):
    """Takes requests over gRPC, and over HTTP through `http.app`; serves while `run` runs.

    `scheduler` and what `connect` returns may be channels in this process or over sockets. Raises
    ConfigError when the model's tokenizer cannot be loaded.
    """

    def __init__(
        self,
        config: GatewayConfig,
        scheduler: aio.Channel,
        connect: Callable[[str], aio.Channel],
        registry: CollectorRegistry,
    ):
        self.config = config
        self.text = Text(config.model)
        self.metrics = Metrics(registry)
        self.draining = False
        self._connect = connect
        defaults = sampling_defaults(config.model) if config.generation_config == "auto" else {}
        self._parser = Parser(config, self.text, lambda: secrets.randbits(63), defaults)
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

    # The request path, shared by gRPC and HTTP

    def admit(self, timeout_s: float = inf, choices: int = 1) -> Clock:
        """A request is at the door, of which nothing else was read yet; its time runs from here.
        Raises ServiceError where it can be told by now that it would be refused. O(1)."""
        now_s = time.monotonic()
        self._check_draining()
        timeout_s = min(timeout_s, self.config.default_deadline_s)
        clock = Clock(now_s, timeout_s)
        with self._counting_refusals():
            self._turnstile.check()
        self.check_room(choices, clock)
        return clock

    def check_room(self, choices: int, clock: Clock) -> None:
        """Raises ServiceError when so many choices would be refused now. O(1)."""
        now_s = time.monotonic()
        with self._counting_refusals():
            self._pipeline.check_room(choices, clock.arrival_s + clock.timeout_s - now_s, now_s)

    async def take_turn(self) -> None:
        """Until tokens that wait to be read leave time for a new request. Raises ServiceError."""
        with self._counting_refusals():
            await self._turnstile.enter()

    def parse(self, request: gateway_pb2.GenerateRequest, clock: Clock) -> Generation:
        """Raises ServiceError; for a client's mistake InvalidArgument, naming the field."""
        reach = self._pipeline.fleet.reach_or(self.text.context_tokens)
        return self._parser.parse(request, reach, clock)

    def check_model(self, name: str) -> None:
        self._parser.check_model(name)

    def open(self, generations: Sequence[Generation]) -> ClientCall:
        """Start answering; iterate the call's chunks, or close it. Raises ServiceError."""
        self._check_draining()
        with self._counting_refusals():
            return self._pipeline.open(generations)

    def _check_draining(self) -> None:
        if self.draining:
            raise ServiceError(Code.UNAVAILABLE, "shutting down; retry elsewhere", 1.0)

    @contextmanager
    def _counting_refusals(self) -> Iterator[None]:
        try:
            yield
        except Refused as refusal:
            self.metrics.refusals.labels(refusal.bar.value).inc()
            raise

    # gRPC

    async def Generate(
        self, request: gateway_pb2.GenerateRequest | None, context: Any
    ) -> AsyncIterator[gateway_pb2.GenerateResponse]:
        if request is None:
            raise InvalidArgument("", "the request is no valid GenerateRequest: bad UTF-8 or wire")
        choices = max(1, min(request.sampling.n, self.config.max_choices))
        clock = self.admit(_timeout_s(context), choices)
        await self.take_turn()
        call = self.open([self.parse(request, clock)])
        context.add_done_callback(lambda _: call.close())
        async for chunk in call.chunks():
            yield _encode(call, chunk)
        yield gateway_pb2.GenerateResponse(
            request_id=call.request_id,
            usage=gateway_pb2.Usage(
                prompt_tokens=call.prompt_tokens, completion_tokens=call.completion_tokens
            ),
        )

    async def ListModels(
        self, request: gateway_pb2.ListModelsRequest, context: Any
    ) -> gateway_pb2.ListModelsResponse:
        model = gateway_pb2.Model(
            name=self.config.model_name, max_context_tokens=self.max_context_tokens
        )
        return gateway_pb2.ListModelsResponse(models=[model])

    async def Why(
        self, request: scheduler_pb2.WhyRequest, context: Any
    ) -> scheduler_pb2.WhyResponse:
        try:
            response = await self._stub.Why(request, timeout=WHY_S)
        except aio.AioRpcError as error:
            raise ServiceError(error.code(), error.details() or error.code().name) from None
        for story in response.stories:
            self._pipeline.verdicts.judge(story)
        return response

    def mount(self) -> Mount:
        """What `services.runtime.server` serves."""
        return Mount(SERVICE_NAME, _add_to_server, self)

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


def _timeout_s(context: Any) -> float:
    """From the call's own deadline, and from metadata as over HTTP; infinite without either."""
    remaining_s = cast(float | None, context.time_remaining())
    limit_s = inf
    if remaining_s is not None:
        limit_s = max(0.0, remaining_s - min(DEADLINE_MARGIN_S, remaining_s / 10))
    for key, value in context.invocation_metadata() or ():
        if key == TIMEOUT_KEY:
            limit_s = min(limit_s, parse_timeout(str(value)))
    return limit_s


def parse_timeout(text: str) -> float:
    """The value of `x-request-timeout-s`; raises InvalidArgument."""
    try:
        timeout_s = float(text)
    except ValueError:
        raise InvalidArgument(TIMEOUT_KEY, f"must be seconds, not {text[:40]!r}") from None
    return check_timeout(TIMEOUT_KEY, timeout_s)


def _encode(call: ClientCall, chunk: ChoiceChunk) -> gateway_pb2.GenerateResponse:
    return gateway_pb2.GenerateResponse(
        request_id=call.request_id,
        index=chunk.index,
        text=chunk.text,
        token_ids=chunk.token_ids,
        logprobs=cast(Any, chunk.logprobs),
        finish_reason=encode_reason(chunk.reason),
    )


class _Registrar:
    """Takes the generated registration; a request that does not parse is the servicer's to
    refuse, since the library would call it an internal error."""

    def __init__(self, server: Any):
        self._server = server

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """Made below, from the handlers as they are changed there."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        lenient = handlers["Generate"]._replace(request_deserializer=_parse_or_none)
        handlers = {**handlers, "Generate": lenient}
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(service, handlers),)
        )
        self._server.add_registered_method_handlers(service, handlers)


def _add_to_server(servicer: Any, server: Any) -> None:
    gateway_pb2_grpc.add_GatewayServicer_to_server(servicer, cast(Any, _Registrar(server)))


def _parse_or_none(data: bytes) -> gateway_pb2.GenerateRequest | None:
    try:
        return gateway_pb2.GenerateRequest.FromString(data)
    except DecodeError:
        return None
