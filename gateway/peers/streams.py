"""The gateway's streams: one to the scheduler, one to each worker of the fleet."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection
from typing import Protocol, cast
from uuid import uuid4

from grpc import aio

from gateway.config import GatewayConfig
from gateway.peers import messages
from gateway.peers.links import Dial, Link, WorkerLinks
from protos.generated import scheduler_pb2, worker_pb2
from protos.generated.scheduler_pb2_grpc import SchedulerStub
from protos.generated.worker_pb2_grpc import WorkerStub
from services.runtime.backoff import Backoff

SchedulerLink = Link[scheduler_pb2.SubmitMessage, scheduler_pb2.SchedulerEvent]
WorkerLink = Link[worker_pb2.WorkerInput, worker_pb2.TokenBatch]
SchedulerDial = Dial[scheduler_pb2.SubmitMessage, scheduler_pb2.SchedulerEvent]
WorkerDial = Dial[worker_pb2.WorkerInput, worker_pb2.TokenBatch]


class StreamHandler(Protocol):
    """Receives what the streams deliver."""

    def on_scheduler_event(self, event: scheduler_pb2.SchedulerEvent) -> None: ...
    def on_scheduler_lost(self) -> None: ...
    def on_worker_stream(self, address: str) -> Collection[worker_pb2.WorkerInput]:
        """A stream opens; returns its first messages."""
        ...

    def on_worker_lost(self, address: str) -> None: ...
    def on_tokens(self, address: str, batch: worker_pb2.TokenBatch) -> None: ...
    def worker_addresses(self) -> Collection[str]:
        """The workers whose streams stay open."""
        ...


class PeerStreams:
    """Keeps the streams open while `run` runs."""

    def __init__(
        self,
        config: GatewayConfig,
        scheduler: aio.Channel,
        connect: Callable[[str], aio.Channel],
        handler: StreamHandler,
    ):
        self._gateway_id = config.gateway_id or uuid4().hex
        self._connect, self._handler = connect, handler
        self._backoff = Backoff(config.connect_backoff_s, config.max_connect_backoff_s)
        self._queue_limit = 4 * config.max_sessions + 1  # a submission and a cancellation, twice
        self._scheduler = self._scheduler_link(scheduler)
        self._workers = WorkerLinks(self._worker_link)

    async def run(self) -> None:
        """Runs until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                self._workers.use_group(group)
                group.create_task(self._scheduler.run())
        finally:
            self._workers.use_group(None)

    def send_to_scheduler(self, message: scheduler_pb2.SubmitMessage) -> bool:
        return self._scheduler.send(message)

    def send_to_worker(self, address: str, message: worker_pb2.WorkerInput) -> bool:
        return self._workers.send(address, message)

    def scheduler_lost_s(self) -> float:
        """Seconds since the scheduler's stream broke; 0 while connected."""
        return self._scheduler.lost_s(time.monotonic())

    def _scheduler_link(self, channel: aio.Channel) -> SchedulerLink:
        handler = self._handler

        def on_event(event: scheduler_pb2.SchedulerEvent) -> None:
            handler.on_scheduler_event(event)
            if event.WhichOneof("kind") == "fleet":
                self._workers.keep_only(handler.worker_addresses())

        return Link(
            "the scheduler",
            cast(SchedulerDial, SchedulerStub(channel).Submit),
            lambda: [messages.submit_hello(self._gateway_id)],
            on_event,
            handler.on_scheduler_lost,
            self._backoff,
            self._queue_limit,
        )

    def _worker_link(self, address: str) -> WorkerLink:
        handler, channel = self._handler, self._connect(address)

        def on_open() -> list[worker_pb2.WorkerInput]:
            return [messages.worker_hello(self._gateway_id), *handler.on_worker_stream(address)]

        return Link(
            f"worker {address}",
            cast(WorkerDial, WorkerStub(channel).Stream),
            on_open,
            lambda batch: handler.on_tokens(address, batch),
            lambda: handler.on_worker_lost(address),
            self._backoff,
            self._queue_limit,
            cast(Callable[[], Awaitable[None]], channel.close),
        )
