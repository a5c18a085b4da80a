"""A scheduler served in process, with gateways, workers and peers driven by the test."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from grpc import aio
from prometheus_client import CollectorRegistry

from protos.generated import (
    common_pb2,
    estimator_pb2_grpc,
    predictor_pb2,
    predictor_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
)
from services.estimator.config import EstimatorConfig
from services.estimator.service import EstimatorService
from services.runtime.network.channel import InProcessServer
from services.runtime.tasks import background
from services.scheduler.config import SchedulerConfig
from services.scheduler.leadership.keeper import SOLE, Leadership
from services.scheduler.links.peers import PeerChannels
from services.scheduler.service import SchedulerService
from tests.reach import reaching

NAME = "foretoken.v1.Scheduler"
ADD = scheduler_pb2_grpc.add_SchedulerServicer_to_server
PROFILE = [
    common_pb2.StepTiming(
        prefill_tokens=p,
        decode_seqs=d,
        context_tokens=d * (16 + d % 5) + p,
        elapsed_s=0.01 + p * 1e-4,
    )
    for p in (0, 16, 64, 256)
    for d in range(1, 33)
]


class Texts(predictor_pb2_grpc.PredictorServicer):
    """A predictor that forecasts ten tokens once it is released, and keeps the texts it
    receives."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.observed = 0  # outcomes
        self.ended: list[str] = []  # requests without an outcome
        self.may = asyncio.Event()

    async def Forecast(
        self, request: predictor_pb2.ForecastRequest, context: object
    ) -> predictor_pb2.ForecastResponse:
        self.heard += [each.text.user_input for each in request.inputs if each.HasField("text")]
        await self.may.wait()
        forecasts = [common_pb2.Forecast(points=[10.0]) for _ in request.inputs]
        return predictor_pb2.ForecastResponse(forecasts=forecasts)

    async def Observe(
        self, request: predictor_pb2.ObserveOutcomesRequest, context: object
    ) -> predictor_pb2.ObserveOutcomesResponse:
        self.observed += len(request.outcomes)
        self.ended += request.ended_ids
        return predictor_pb2.ObserveOutcomesResponse()

    async def Improve(
        self, request: predictor_pb2.ImproveRequest, context: object
    ) -> AsyncIterator[predictor_pb2.ImprovedForecasts]:
        await asyncio.Event().wait()
        yield predictor_pb2.ImprovedForecasts()


class Stream:
    """The client side of a stream: sends given messages, keeps received ones and its end."""

    def __init__(self, method: Any):
        self._said: asyncio.Queue[Any] = asyncio.Queue()
        self.heard: list[Any] = []
        self.ended: aio.AioRpcError | None = None
        self._call = method(iter_queue(self._said))
        self.reading = asyncio.ensure_future(self._read())

    def say(self, message: Any) -> None:
        self._said.put_nowait(message)

    def leave(self) -> None:
        self._said.put_nowait(None)

    async def _read(self) -> None:
        try:
            async for message in self._call:
                self.heard.append(message)
        except aio.AioRpcError as error:
            self.ended = error


async def iter_queue(queue: asyncio.Queue[Any]) -> AsyncIterator[Any]:
    while (message := await queue.get()) is not None:
        yield message


@dataclass
class Live:
    """A running scheduler, and the streams that a test opened to it."""

    service: SchedulerService
    registry: CollectorRegistry
    channel: aio.Channel
    stub: "scheduler_pb2_grpc.SchedulerAsyncStub"
    texts: Texts
    streams: list[Stream] = field(default_factory=list)

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"foretoken_{name}", labels)

    def gateway(self) -> Stream:
        stream = Stream(self.stub.Submit)
        stream.say(scheduler_pb2.SubmitMessage(hello=scheduler_pb2.SubmitHello(gateway_id="g")))
        self.streams.append(stream)
        return stream

    def worker(self, name: str = "w", **hello: Any) -> Stream:
        stream = Stream(self.stub.Attach)
        given: dict[str, Any] = {
            "worker_id": name, "address": "unix:/w", "model": "demo", "block_tokens": 16,
            "kv_tokens": 16_000, "max_running": 200, "max_context_tokens": 500,
        } | hello  # fmt: skip
        stream.say(scheduler_pb2.WorkerMessage(hello=scheduler_pb2.WorkerHello(**given)))
        self.streams.append(stream)
        return stream


@asynccontextmanager
async def running(
    batcher: aio.Channel | None = None, leadership: Leadership = SOLE, **config: Any
) -> AsyncIterator[Live]:
    advisers: Any = InProcessServer()
    texts, registry = Texts(), CollectorRegistry()
    predictor_pb2_grpc.add_PredictorServicer_to_server(texts, advisers)
    estimator = EstimatorService(EstimatorConfig(), CollectorRegistry())
    estimator_pb2_grpc.add_EstimatorServicer_to_server(estimator, advisers)
    channel = advisers.channel()
    # Longer than any test: the test decides when a forecast arrives.
    given = (
        dict.fromkeys(("forecast_patience_s", "forecast_timeout_s", "forecast_late_s"), 60.0)
        | config
    )
    service = SchedulerService(
        SchedulerConfig(**given),
        PeerChannels(channel, channel),
        registry,
        batcher,
        leadership=leadership,
    )
    counted = service.metrics.invalid.count
    async with (
        reaching("socket", NAME, ADD, service, counted) as reached,
        background(service.run()),
    ):
        live = Live(service, registry, reached, scheduler_pb2_grpc.SchedulerStub(reached), texts)
        yield live
        for stream in live.streams:
            stream.leave()
        await asyncio.gather(*(stream.reading for stream in live.streams))


def submitted(name: str, model: str = "demo") -> scheduler_pb2.SubmitMessage:
    request = scheduler_pb2.NewRequest(
        request_id=name,
        model=model,
        prompt_tokens=10,
        max_tokens=50,
        text=common_pb2.PromptText(user_input=name),
    )
    return scheduler_pb2.SubmitMessage(request=request)


def cancelled(name: str) -> scheduler_pb2.SubmitMessage:
    return scheduler_pb2.SubmitMessage(cancel=scheduler_pb2.CancelRequest(request_id=name))


def run_step(stream: Stream, kind: str) -> list[str]:
    """Ids of the requests with this event, in order."""
    events = [each.request for each in stream.heard if each.HasField("request")]
    return [event.request_id for event in events if event.HasField(kind)]


def fleets(stream: Stream) -> list[scheduler_pb2.FleetView]:
    return [each.fleet for each in stream.heard if each.HasField("fleet")]
