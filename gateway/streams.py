"""The gateway's streams, one to the scheduler and one to each worker, bound to its sessions."""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import cast
from uuid import uuid4

from grpc import aio

from gateway.config import GatewayConfig
from gateway.intake import RequestIntake
from gateway.peers.border import check_event, check_tokens
from gateway.peers.link import Dial, Link
from gateway.sessions.sessions import Sessions
from protos.generated import scheduler_pb2, worker_pb2
from protos.generated.scheduler_pb2_grpc import SchedulerStub
from protos.generated.worker_pb2_grpc import WorkerStub
from services.runtime.network.backoff import Backoff
from services.runtime.network.streams import Outbox, ResponseStream
from services.runtime.telemetry.invalid_messages import InvalidMessages

SchedulerLink = Link[scheduler_pb2.SubmitMessage, scheduler_pb2.SchedulerEvent]
WorkerLink = Link[worker_pb2.WorkerInput, worker_pb2.TokenBatch]
SchedulerDial = Dial[scheduler_pb2.SubmitMessage, scheduler_pb2.SchedulerEvent]
WorkerDial = Dial[worker_pb2.WorkerInput, worker_pb2.TokenBatch]


@dataclass(slots=True)
class WorkerStream:
    """The link to a worker's address. `epoch`: that of the process there when the stream opened, if
    the fleet has it; 0: unknown."""

    link: WorkerLink
    task: asyncio.Task[None]
    epoch: int = 0

    def follow(self, epoch: int) -> None:
        """Opens the stream again if another process is at the address now: the connection may lead
        to the earlier one, which gets no plans."""
        if self.epoch and epoch != self.epoch:
            self.link.reopen()
        self.epoch = epoch


class PeerStreams:
    """Keeps the streams open while `run` runs, and reads the clock once per received message.

    A worker's stream opens on first use. It closes when the worker has left the fleet and holds no
    choice.
    """

    def __init__(
        self,
        config: GatewayConfig,
        scheduler: aio.Channel,
        connect: Callable[[str], aio.Channel],
        vocabulary_tokens: int,
        invalid: InvalidMessages,
    ):
        """`vocabulary_tokens`: of the model. `invalid` counts the messages of peers."""
        self._gateway_id = config.gateway_id or uuid4().hex
        self._scheduler_channel, self._connect = scheduler, connect
        self._vocabulary_tokens, self._invalid = vocabulary_tokens, invalid
        self._backoff = Backoff(config.connect_backoff_s, config.max_connect_backoff_s)
        self._queue_limit = 4 * config.max_sessions + 1  # a submission and a cancellation, twice
        self._workers: dict[str, WorkerStream] = {}
        self._scheduler: SchedulerLink | None = None  # both only while `run` runs
        self._open_worker: Callable[[str], None] | None = None

    async def run(self, sessions: Sessions, intake: RequestIntake) -> None:
        """Runs until cancelled."""
        self._scheduler = self._make_scheduler_link(sessions)
        try:
            async with asyncio.TaskGroup() as group:

                def open_worker(address: str) -> None:
                    link = self._make_worker_link(address, sessions, intake)
                    self._workers[address] = WorkerStream(link, group.create_task(link.run()))

                self._open_worker = open_worker
                group.create_task(self._scheduler.run())
        finally:
            self._scheduler = self._open_worker = None
            self._workers.clear()

    def send_to_scheduler(self, message: scheduler_pb2.SubmitMessage) -> bool:
        """Queues a message; False without an open stream."""
        return self._scheduler is not None and self._scheduler.send(message)

    def send_to_worker(self, address: str, message: worker_pb2.WorkerInput) -> bool:
        """Queues a message; False if the stream is not open yet. It then begins with the prompts
        that `on_worker_stream` returns."""
        if address in self._workers:
            return self._workers[address].link.send(message)
        if self._open_worker is not None:
            self._open_worker(address)
        return False

    def scheduler_lost_s(self) -> float:
        """Seconds since the scheduler's stream broke; 0 while connected."""
        return 0.0 if self._scheduler is None else self._scheduler.lost_s(time.monotonic())

    def _close_unused(self, addresses: set[str]) -> None:
        """Closes the links to workers that are not in `addresses`."""
        for address in self._workers.keys() - addresses:
            self._workers.pop(address).task.cancel()

    def _follow(self, epochs: Mapping[str, int]) -> None:
        """Gives each stream the epoch of the process that is at its address now."""
        for address, stream in self._workers.items():
            if epoch := epochs.get(address):
                stream.follow(epoch)

    def _make_scheduler_link(self, sessions: Sessions) -> SchedulerLink:
        hello = scheduler_pb2.SubmitHello(gateway_id=self._gateway_id)

        def on_event(event: scheduler_pb2.SchedulerEvent) -> None:
            check_event(event)
            sessions.placement.on_event(event, time.monotonic())
            if event.HasField("fleet"):
                self._close_unused(sessions.worker_addresses)
                self._follow(sessions.peers.fleet.addresses)

        return Link(
            "the scheduler",
            cast(SchedulerDial, SchedulerStub(self._scheduler_channel).Submit),
            lambda: [scheduler_pb2.SubmitMessage(hello=hello)],
            on_event,
            sessions.placement.on_scheduler_lost,
            self._backoff,
            self._queue_limit,
            partial(self._invalid.count, "Submit"),
        )

    def _make_worker_link(
        self, address: str, sessions: Sessions, intake: RequestIntake
    ) -> WorkerLink:
        channels: list[aio.Channel] = []  # of the present stream
        hello = worker_pb2.StreamHello(gateway_id=self._gateway_id)

        def dial(outbox: Outbox[worker_pb2.WorkerInput]) -> ResponseStream[worker_pb2.TokenBatch]:
            """On a new connection: a name may lead to another process now."""
            channels.append(self._connect(address))
            return cast(WorkerDial, WorkerStub(channels[0]).Stream)(outbox)

        async def close() -> None:
            await channels.pop().close()

        def on_open() -> list[worker_pb2.WorkerInput]:
            self._workers[address].epoch = sessions.peers.fleet.addresses.get(address, 0)
            prompts = sessions.placement.on_worker_stream(address, time.monotonic())
            return [worker_pb2.WorkerInput(hello=hello), *prompts]

        def on_tokens(batch: worker_pb2.TokenBatch) -> None:
            check_tokens(batch, self._vocabulary_tokens)
            intake.on_tokens()
            sessions.delivery.on_tokens(address, batch, time.monotonic())

        return Link(
            f"worker {address}",
            dial,
            on_open,
            on_tokens,
            lambda: sessions.placement.on_worker_lost(address),
            self._backoff,
            self._queue_limit,
            partial(self._invalid.count, "Stream"),
            close,
        )
