"""The scheduler's servicer over a real socket, its advisers gone or as a test needs them."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc
import pytest
from grpc import aio
from prometheus_client import CollectorRegistry

from protos import (
    batcher_pb2,
    batcher_pb2_grpc,
    common_pb2,
    estimator_pb2_grpc,
    predictor_pb2,
    predictor_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
)
from services.estimator.config import EstimatorConfig
from services.estimator.service import EstimatorService
from services.runtime.channel import InProcessServer, connect
from services.runtime.tasks import background
from services.scheduler.advice import Advisers
from services.scheduler.board.ledger import UNMEASURED
from services.scheduler.config import SchedulerConfig
from services.scheduler.service import SchedulerService
from tests.reach import reaching, until

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
    """Foresees ten tokens of each once it may, and keeps the texts it was sent."""

    def __init__(self) -> None:
        self.heard: list[str] = []
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
        return predictor_pb2.ObserveOutcomesResponse()

    async def Improve(
        self, request: predictor_pb2.ImproveRequest, context: object
    ) -> AsyncIterator[predictor_pb2.ImprovedForecasts]:
        await asyncio.Event().wait()
        yield predictor_pb2.ImprovedForecasts()


class Stream:
    """One side of a two-way stream: says what it is given, keeps what it hears and how it ends."""

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
    """A scheduler that runs, and the streams that a test opened into it."""

    service: SchedulerService
    registry: CollectorRegistry
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
async def running(batcher: aio.Channel | None = None, **config: Any) -> AsyncIterator[Live]:
    advisers: Any = InProcessServer()
    texts, registry = Texts(), CollectorRegistry()
    predictor_pb2_grpc.add_PredictorServicer_to_server(texts, advisers)
    estimator = EstimatorService(EstimatorConfig(), CollectorRegistry())
    estimator_pb2_grpc.add_EstimatorServicer_to_server(estimator, advisers)
    channel = advisers.channel()
    # Later than any test takes: what a forecast waits for is what the test says.
    given = (
        dict.fromkeys(("forecast_patience_s", "forecast_timeout_s", "forecast_late_s"), 60.0)
        | config
    )
    service = SchedulerService(
        SchedulerConfig(**given), Advisers(channel, channel), registry, batcher
    )
    async with reaching("socket", NAME, ADD, service) as reached, background(service.run()):
        live = Live(service, registry, scheduler_pb2_grpc.SchedulerStub(reached), texts)
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


def told(stream: Stream, kind: str) -> list[str]:
    """Requests of which it heard this, in order."""
    events = [each.request for each in stream.heard if each.HasField("request")]
    return [event.request_id for event in events if event.HasField(kind)]


def fleets(stream: Stream) -> list[scheduler_pb2.FleetView]:
    return [each.fleet for each in stream.heard if each.HasField("fleet")]


async def test_a_worker_that_comes_back_has_its_cost_model_again() -> None:
    async with running() as live:
        workers = live.service.state.workers
        for _ in range(2):
            worker = live.worker(profile=PROFILE)
            await until(lambda: "w" in workers and workers["w"].cost is not UNMEASURED)
            assert workers["w"].cost.samples > 0
            worker.leave()
            await worker.reading
            await until(lambda: "w" not in workers)


async def test_a_hundred_requests_of_one_turn_of_the_loop_make_few_rounds() -> None:
    """They are forecast in one call, and one round places them all."""
    async with running() as live:
        live.texts.may.set()
        live.worker()
        await until(lambda: "w" in live.service.state.workers)
        await settled(live)
        rounds = live.service.state.rounds.number
        for number in range(100):
            live.service._submit("nobody#1", submitted(f"r{number}").request)
        await until(lambda: live.service.state.ledger.running == 100)
        assert live.service.state.rounds.number - rounds <= 3


async def settled(live: Live) -> None:
    """Nothing is left to be decided."""
    await until(lambda: live.service.state.round_due_s == float("inf"))


async def test_the_fleet_is_told_now_and_then_and_only_what_is_news() -> None:
    interval_s = 0.1
    async with running(fleet_interval_s=interval_s) as live:
        gateway = live.gateway()
        await until(lambda: len(fleets(gateway)) == 1)
        started_s = time.monotonic()
        for number in range(50):
            gateway.say(submitted(f"r{number}"))
            await asyncio.sleep(0.005)
        await until(lambda: fleets(gateway)[-1].queued == 50)
        most = (time.monotonic() - started_s) / interval_s + 1
        assert 1 < len(fleets(gateway)) <= 1 + most
        heard = len(fleets(gateway))
        await asyncio.sleep(3 * interval_s)
        assert len(fleets(gateway)) == heard
        gateway.say(cancelled("r0"))  # one of fifty is no news
        await until(lambda: live.service.state.ledger.waiting == 49)
        await asyncio.sleep(3 * interval_s)
        assert len(fleets(gateway)) == heard


async def test_a_worker_that_comes_or_goes_is_told_at_once() -> None:
    async with running(fleet_interval_s=60.0) as live:
        gateway = live.gateway()
        await until(lambda: len(fleets(gateway)) == 1)
        worker = live.worker()
        await until(lambda: [w.worker_id for w in fleets(gateway)[-1].workers] == ["w"])
        worker.leave()
        await until(lambda: len(fleets(gateway)[-1].workers) == 0)


async def test_who_has_the_same_name_ends_the_stream_of_the_one_before() -> None:
    async with running() as live:
        first = live.worker()
        await until(lambda: "w" in live.service.state.workers)
        link = live.service.state.workers["w"].link
        second = live.worker()
        await asyncio.wait_for(first.reading, 10)
        assert first.ended is not None
        assert first.ended.code() is grpc.StatusCode.ALREADY_EXISTS
        assert first.ended.details() == "another worker attached as w"
        assert live.service.state.workers["w"].link != link
        assert not second.reading.done()
        assert live.value("kv_free_tokens", worker="w") == 16_000


async def test_a_lost_workers_gauges_go() -> None:
    async with running() as live:
        first, second = live.worker("w"), live.worker("v")
        await until(lambda: live.value("kv_free_tokens", worker="v") is not None)
        await until(lambda: live.value("kv_free_tokens", worker="w") is not None)
        report = scheduler_pb2.Report(seq=1, free_blocks=500)
        first.say(scheduler_pb2.WorkerMessage(report=report))
        await until(lambda: live.value("kv_cache_usage_perc", worker="w") == 0.5)
        first.leave()
        await until(lambda: live.value("kv_cache_usage_perc", worker="w") is None)
        assert live.value("kv_free_tokens", worker="w") is None
        assert live.value("kv_free_tokens", worker="v") == 16_000
        assert not second.reading.done()


def kept(live: Live) -> set[str]:
    """Requests of which something is kept to ask for a forecast with."""
    forecasts = live.service._advice._forecasts
    return {*forecasts._texts, *forecasts._questions, *forecasts._caps}


async def test_nothing_is_kept_of_who_was_refused_cancelled_or_has_ended() -> None:
    async with running() as live:
        live.texts.may.set()
        worker, gateway = live.worker(), live.gateway()
        await until(lambda: bool(gateway.heard) and "w" in live.service.state.workers)
        gateway.say(submitted("no model", model="unknown"))
        await until(lambda: told(gateway, "rejected") == ["no model"])
        assert kept(live) == set()
        gateway.say(submitted("r0"))
        gateway.say(submitted("r1"))
        await until(lambda: len(told(gateway, "placed")) == 2)
        assert kept(live) == {"r0", "r1"}
        gateway.say(cancelled("r0"))
        await until(lambda: kept(live) == {"r1"})
        done = scheduler_pb2.FinishedRequest(
            request_id="r1", output_tokens=3, reason=common_pb2.FINISH_REASON_STOP
        )
        report = scheduler_pb2.Report(seq=1, applied_plan_seq=1, finished=[done])
        worker.say(scheduler_pb2.WorkerMessage(report=report))
        await until(lambda: told(gateway, "finished") == ["r1"])
        assert kept(live) == set()


async def test_one_refused_for_its_name_leaves_the_one_that_has_it_its_forecast() -> None:
    """The first call is under way; what is asked meanwhile waits for the next."""
    async with running() as live:
        live.worker()
        gateway = live.gateway()
        await until(lambda: bool(gateway.heard) and "w" in live.service.state.workers)
        gateway.say(submitted("first"))
        await until(lambda: live.texts.heard == ["first"])
        gateway.say(submitted("twin"))
        gateway.say(submitted("twin"))
        await until(lambda: told(gateway, "rejected") == ["twin"])
        live.texts.may.set()
        await until(lambda: told(gateway, "placed") == ["first", "twin"])
        assert live.texts.heard == ["first", "twin"]


# A batcher of its own


class Refusing(batcher_pb2_grpc.BatcherServicer):
    async def Arrange(self, requests: Any, context: Any) -> AsyncIterator[batcher_pb2.Arrangement]:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "hello: unknown here")
        yield batcher_pb2.Arrangement()


class Silent(batcher_pb2_grpc.BatcherServicer):
    async def Arrange(self, requests: Any, context: Any) -> AsyncIterator[batcher_pb2.Arrangement]:
        async for _ in requests:
            await asyncio.sleep(3_600)
        yield batcher_pb2.Arrangement()


@pytest.mark.parametrize("batcher", [Refusing, Silent])
async def test_a_batcher_that_fails_ends_nothing(
    batcher: type[batcher_pb2_grpc.BatcherServicer],
) -> None:
    add = batcher_pb2_grpc.add_BatcherServicer_to_server
    async with reaching("socket", "foretoken.v1.Batcher", add, batcher()) as channel:
        await served_by(channel, ("late", "gone"))


async def test_a_batcher_that_is_not_there_ends_nothing() -> None:
    channel = connect("unix:/nobody")
    await served_by(channel, ("gone",))
    await channel.close()


def has_placed(gateway: Stream, count: int) -> bool:
    return len(told(gateway, "placed")) == count


async def served_by(channel: aio.Channel, whys: Sequence[str]) -> None:
    async with running(batcher=channel) as live:
        live.texts.may.set()
        live.worker()
        gateway = live.gateway()
        await until(lambda: bool(gateway.heard) and "w" in live.service.state.workers)
        for number in range(5):
            gateway.say(submitted(f"r{number}"))
            await until(partial(has_placed, gateway, number + 1))
        series = "scheduler_rounds_arranged_total"
        counts = [live.value(series, by=why) or 0 for why in whys]
        assert sum(counts) >= 5
        assert not live.value(series, by="batcher")
