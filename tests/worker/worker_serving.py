"""A real worker between a scheduler and gateways that record what they receive."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from grpc import aio
from prometheus_client import CollectorRegistry

from observability.tracing import OFF, Tracing
from protos.generated import (
    common_pb2,
    scheduler_pb2,
    scheduler_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from services.core import Grant, Plan
from services.runtime.codecs.attach import encode_plan
from services.runtime.errors import ServiceError
from services.runtime.network.channel import connect
from services.runtime.network.streams import Outbox, duplex
from services.runtime.server import Mount, listening
from services.runtime.tasks import background
from services.worker.__main__ import build
from services.worker.config import WorkerConfig

KV_TOKENS = 512
Prompt = worker_pb2.Prompt


class RecordingScheduler(scheduler_pb2_grpc.SchedulerServicer):
    """Records hellos and reports; sends the plans of a test."""

    def __init__(self) -> None:
        self.hellos: list[scheduler_pb2.WorkerHello] = []
        self.reports: list[scheduler_pb2.Report] = []
        self.beats = 0
        self.drains_s: list[float] = []  # of workers that announced a drain
        self.adapters: list[scheduler_pb2.AdapterStates] = []
        self.seq = 0
        self.address = ""  # and what ends its server, where a test needs these
        self.stop: Callable[[], Awaitable[None]]
        self._farewell: ServiceError | None = None
        self._plans: Outbox[scheduler_pb2.Plan] = Outbox(1000)

    async def Attach(
        self, requests: AsyncIterator[scheduler_pb2.WorkerMessage], context: object
    ) -> AsyncIterator[scheduler_pb2.Plan]:
        self._plans, self.seq = Outbox(1000), 0
        async for plan in duplex(self._read(requests), self._plans):
            yield plan
        if self._farewell:
            raise self._farewell

    async def LoadAdapter(
        self, request: scheduler_pb2.Adapter, context: Any
    ) -> scheduler_pb2.AdapterResponse:
        raise NotImplementedError

    async def UnloadAdapter(
        self, request: scheduler_pb2.Adapter, context: Any
    ) -> scheduler_pb2.AdapterResponse:
        raise NotImplementedError

    async def _read(self, requests: AsyncIterator[scheduler_pb2.WorkerMessage]) -> None:
        async for message in requests:
            if message.HasField("hello"):
                self.hellos.append(message.hello)
            elif message.HasField("draining"):
                self.drains_s.append(message.draining.drain_s)
            elif message.HasField("adapters"):
                self.adapters.append(message.adapters)
            elif message.HasField("alive"):
                self.beats += 1
            elif message.HasField("report"):
                self.reports.append(message.report)

    async def Submit(self, requests: Any, context: object) -> AsyncIterator[Any]:
        raise NotImplementedError
        yield

    async def Why(self, request: Any, context: object) -> Any:
        raise NotImplementedError

    async def GetFleet(self, request: Any, context: object) -> Any:
        raise NotImplementedError

    def plan(self, **directives: Any) -> None:
        self.seq += 1
        self._plans.put(encode_plan(Plan(self.seq, **directives)))

    def ask_adapters(self, seq: int, **paths: str) -> None:
        adapters = [scheduler_pb2.Adapter(name=name, path=path) for name, path in paths.items()]
        wanted = scheduler_pb2.AdapterSet(seq=seq, adapters=adapters)
        self._plans.put(scheduler_pb2.Plan(adapters=wanted))

    def admit(self, *request_ids: str, limit: int = 400) -> None:
        self.plan(admit=tuple(Grant(request_id, limit) for request_id in request_ids))

    def hang_up(self, farewell: ServiceError | None = None) -> None:
        self._farewell = farewell
        self._plans.close()

    @property
    def finished(self) -> dict[str, int]:
        return {f.request_id: f.reason for report in self.reports for f in report.finished}


class RecordingGateway:
    """Sends prompts; records the received tokens and checks their offsets."""

    def __init__(self, channel: aio.Channel, name: str):
        self._up: Outbox[worker_pb2.WorkerInput] = Outbox(1000)
        hello = worker_pb2.StreamHello(gateway_id=name)
        self._up.put(worker_pb2.WorkerInput(hello=hello))
        self._call = worker_pb2_grpc.WorkerStub(channel).Stream(aiter(self._up))
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.first: dict[str, worker_pb2.RequestTokens] = {}
        self.ended: dict[str, worker_pb2.RequestTokens] = {}

    def send(
        self,
        request_id: str,
        tokens: tuple[int, ...],
        most: int,
        traceparent: str = "",
        **sampling: Any,
    ) -> None:
        how = common_pb2.Sampling(**{"temperature": 0, **sampling})
        prompt = Prompt(request_id=request_id, token_ids=tokens, prompt_tokens=len(tokens),
                        max_tokens=most, sampling=how, traceparent=traceparent)  # fmt: skip
        self.send_raw(prompt)

    def send_raw(self, prompt: worker_pb2.Prompt) -> None:
        self._up.put(worker_pb2.WorkerInput(prompt=prompt))

    async def read(self) -> None:
        async for batch in self._call:
            for message in batch.requests:
                assert message.offset == len(self.tokens[message.request_id])
                self.tokens[message.request_id] += message.token_ids
                self.first.setdefault(message.request_id, message)
                if message.finish_reason:
                    self.ended[message.request_id] = message

    def leave(self) -> None:
        self._call.cancel()


@dataclass
class RunningWorker:
    scheduler: RecordingScheduler
    channel: aio.Channel
    address: str
    registry: CollectorRegistry
    gateways: list[RecordingGateway] = field(default_factory=list)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def gateway(self, name: str = "g") -> RecordingGateway:
        gateway = RecordingGateway(self.channel, name)
        task = asyncio.create_task(gateway.read())
        self.tasks.add(task)
        return gateway

    async def free_again(self) -> None:
        await until(lambda: self.scheduler.reports[-1].free_blocks == KV_TOKENS // 16)


async def until(condition: Callable[[], object], limit_s: float = 20) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110 - the condition has no event
            await asyncio.sleep(0.005)


@asynccontextmanager
async def running(
    folder: Path, tracing: Tracing = OFF, **settings: Any
) -> AsyncIterator[RunningWorker]:
    """An attached worker with the small Llama."""
    with TemporaryDirectory() as sockets:
        scheduler = RecordingScheduler()
        add = scheduler_pb2_grpc.add_SchedulerServicer_to_server
        mount = Mount("foretoken.v1.Scheduler", add, scheduler)
        config = WorkerConfig(
            worker_id="w",
            address=f"unix:{sockets}/worker",
            scheduler_address=f"unix:{sockets}/scheduler",
            model=str(folder),
            served_model_name="small",
            profile_s=0.05,
            **{"kv_tokens": KV_TOKENS, **settings},
        )
        registry = CollectorRegistry()
        unit = build(config, registry, tracing)
        async with (
            listening([mount], config.scheduler_address),
            background(unit.run()),
            listening(unit.mounts, config.address),
        ):
            channel = connect(config.address)
            world = RunningWorker(scheduler, channel, config.address, registry)
            await until(lambda: scheduler.hellos)
            try:
                yield world
            finally:
                for task in world.tasks:
                    task.cancel()
                await asyncio.gather(*world.tasks, return_exceptions=True)
                await channel.close()
