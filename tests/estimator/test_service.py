"""The estimator's API over a socket and in process."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import grpc
import pytest
from grpc import aio
from prometheus_client import CollectorRegistry

from foretoken.running.control import build_control_plane
from foretoken.running.options import ServeOptions, sections
from observability.metrics import estimator as catalogue
from protos.generated import (
    common_pb2,
    estimator_pb2,
    estimator_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
)
from services.costs import CostModel
from services.estimator.config import EstimatorConfig
from services.estimator.metrics import MAX_WORKERS_SHOWN, EstimatorMetrics
from services.estimator.service import EstimatorService
from services.runtime.network.channel import connect
from services.runtime.tasks import background
from services.scheduler.core.jobs import WorkerJobs
from tests.observability.metrics.seen import uncatalogued, unseen
from tests.reach import WAYS, reaching, until

NAME = "foretoken.v1.Estimator"
ADD = estimator_pb2_grpc.add_EstimatorServicer_to_server
ASK = estimator_pb2.GetCostModelRequest(worker_id="w0")


def service(registry: CollectorRegistry | None = None, watchers_max: int = 8) -> EstimatorService:
    config = EstimatorConfig(
        refit_samples=8, refit_interval_s=0, watchers_max=watchers_max, batch_refresh_s=1e-9
    )
    return EstimatorService(config, registry or CollectorRegistry())


def timings(
    count: int, worker_id: str = "w0", base_s: float = 0.002
) -> estimator_pb2.ObserveTimingsRequest:
    """Steps of base + 1 ms per sequence + 0.1 ms per prefill token."""
    steps = [(16 * (i % 3), i % 5, i % 7) for i in range(1, count + 1)]
    return estimator_pb2.ObserveTimingsRequest(
        worker_id=worker_id,
        timings=[
            common_pb2.StepTiming(
                prefill_tokens=p,
                decode_seqs=d,
                context_tokens=16 * d + c,
                elapsed_s=base_s + 0.001 * d + 0.0001 * p,
            )
            for p, d, c in steps
        ],
    )


def swaps(
    direction: common_pb2.Direction.ValueType, *tokens: int
) -> estimator_pb2.ObserveTimingsRequest:
    """Swaps at 10 µs per token."""
    return estimator_pb2.ObserveTimingsRequest(
        worker_id="w0",
        swaps=[
            common_pb2.SwapTiming(direction=direction, tokens=n, elapsed_s=1e-5 * n) for n in tokens
        ],
    )


@pytest.mark.parametrize("way", WAYS)
async def test_timings_produce_cost_model(way: str) -> None:
    async with reaching(way, NAME, ADD, service()) as channel:
        stub = estimator_pb2_grpc.EstimatorStub(channel)
        with pytest.raises(aio.AioRpcError) as caught:
            await stub.GetCostModel(ASK)
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND
        assert caught.value.details() == ("worker 'w0' has no cost model yet: too few step timings")

        assert (await stub.Observe(timings(4))).version == 0
        assert (await stub.Observe(timings(20))).version == 1
        model = await stub.GetCostModel(ASK)
        assert (model.worker_id, model.version, model.source) == ("w0", 1, "linear")
        assert model.base_s == pytest.approx(0.002, rel=1e-3)
        assert model.decode_seq_s == pytest.approx(0.001, rel=1e-3)
        assert model.prefill_token_s == pytest.approx(0.0001, rel=1e-3)
        assert model.context_token_s == pytest.approx(0, abs=1e-7)


@pytest.mark.parametrize("way", WAYS)
async def test_watcher_receives_first_and_newer_models(way: str) -> None:
    async with reaching(way, NAME, ADD, service()) as channel, asyncio.timeout(20):
        stub = estimator_pb2_grpc.EstimatorStub(channel)
        call = stub.WatchCostModel(ASK)
        models = aiter(call)
        first = asyncio.ensure_future(anext(models))
        await stub.Observe(timings(20, "other"))
        await stub.Observe(timings(20))
        assert ((await first).worker_id, (await first).version) == ("w0", 1)
        await stub.Observe(timings(20, base_s=0.004))
        assert (await anext(models)).version == 2

        late = aiter(stub.WatchCostModel(ASK))
        assert (await anext(late)).version == 2


@pytest.mark.parametrize("way", WAYS)
async def test_swaps_produce_prices_for_watchers(way: str) -> None:
    registry = CollectorRegistry()
    async with reaching(way, NAME, ADD, service(registry)) as channel, asyncio.timeout(20):
        stub = estimator_pb2_grpc.EstimatorStub(channel)
        await stub.Observe(timings(20))
        models = aiter(stub.WatchCostModel(ASK))
        assert (await anext(models)).upload_token_s == 0

        assert (await stub.Observe(swaps(common_pb2.DIRECTION_UPLOAD, 64, 64, 32, 0))).version == 2
        priced = await anext(models)
        assert (priced.version, priced.offload_token_s) == (2, 0)
        assert priced.upload_token_s == pytest.approx(1e-5)
        assert (await stub.Observe(swaps(common_pb2.DIRECTION_UNSPECIFIED, 64))).version == 2
        value = registry.get_sample_value
        assert value("foretoken_estimator_swaps_total", {"used": "yes"}) == 3
        assert value("foretoken_estimator_swaps_total", {"used": "no"}) == 2
        assert value("foretoken_estimator_refits_total") == 1
        price = value(
            "foretoken_estimator_swap_token_seconds", {"worker": "w0", "direction": "upload"}
        )
        assert price == pytest.approx(1e-5)


@pytest.mark.parametrize("way", WAYS)
async def test_batches_produce_neighbours(way: str) -> None:
    """16 tokens of 2 prompts of 8 take 0.002 + 16·0.0001 + 16·0.004 = 0.0676 s, not 10 s."""
    registry = CollectorRegistry()
    async with reaching(way, NAME, ADD, service(registry)) as channel, asyncio.timeout(20):
        stub = estimator_pb2_grpc.EstimatorStub(channel)
        await stub.Observe(timings(20))
        models = aiter(stub.WatchCostModel(ASK))
        assert not (await anext(models)).neighbours

        def batch(elapsed_s: float) -> estimator_pb2.BatchTiming:
            return estimator_pb2.BatchTiming(
                seqs=2, length_tokens=8, generated_tokens=16, elapsed_s=elapsed_s
            )

        as_told = [batch(0.0676)] * 32
        await stub.Observe(
            estimator_pb2.ObserveTimingsRequest(
                worker_id="w0", batches=[batch(10.0), batch(0.0), *as_told]
            )
        )
        await stub.Observe(estimator_pb2.ObserveTimingsRequest(worker_id="w0"))
        taught = await anext(models)
        assert (taught.version, list(taught.neighbours)) == (2, [2, 8, 16, 10.0])
        assert taught.neighbours_asked == 5
        value = registry.get_sample_value
        assert value("foretoken_estimator_batches_total", {"used": "yes"}) == 33
        assert value("foretoken_estimator_batches_total", {"used": "no"}) == 1
        error = value(
            "foretoken_estimator_batch_relative_error", {"worker": "w0", "quantile": "0.5"}
        )
        assert error == pytest.approx(0, abs=0.01)
        assert unseen(registry, catalogue.ALL) == []
        assert uncatalogued(registry, catalogue.ALL) == set()


async def test_error_covers_estimates_before_learning() -> None:
    """First the error is the fit's; then every step takes twice its estimate."""
    registry = CollectorRegistry()
    value = registry.get_sample_value
    one, median = {"worker": "w0"}, {"worker": "w0", "quantile": "0.5"}
    async with reaching("in-process", NAME, ADD, service(registry)) as channel:
        stub = estimator_pb2_grpc.EstimatorStub(channel)
        await stub.Observe(timings(20))
        models = aiter(stub.WatchCostModel(ASK))
        await anext(models)
        assert value("foretoken_estimator_error_steps", one) == 0
        fitted = value("foretoken_estimator_relative_error", median)
        assert fitted is not None and fitted < 0.01
        slower = timings(50)
        for timing in slower.timings:
            timing.elapsed_s *= 2
        await stub.Observe(slower)
        steps = sum(1 for t in slower.timings if t.prefill_tokens or t.decode_seqs)
        assert value("foretoken_estimator_error_steps", one) == steps
        median_error = value("foretoken_estimator_relative_error", median)
        assert median_error == pytest.approx(0.5, rel=0.01)


@pytest.mark.parametrize("way", WAYS)
async def test_worker_metrics_exist_while_watched(way: str) -> None:
    registry = CollectorRegistry()

    def errors() -> dict[str, float | None]:
        """The error of each worker with a series."""
        return {
            sample.labels["worker"]: sample.value
            for family in registry.collect()
            for sample in family.samples
            if sample.name == catalogue.ERROR.family and sample.labels["quantile"] == "0.9"
        }

    async with reaching(way, NAME, ADD, service(registry)) as channel, asyncio.timeout(20):
        stub = estimator_pb2_grpc.EstimatorStub(channel)
        watching = {name: asyncio.ensure_future(_watch(stub, name)) for name in ("w0", "w1")}
        for name in watching:
            await stub.Observe(timings(20, name))
        await until(lambda: errors().keys() == {"w0", "w1"})
        uneven = timings(20, "w1")
        for number, timing in enumerate(uneven.timings):
            timing.elapsed_s *= 1 + number % 3
        error = errors()["w0"]
        await stub.Observe(uneven)
        assert errors()["w0"] == error  # the fit of another worker does not matter
        assert (errors()["w1"] or 0) > 0.1

        watching["w1"].cancel()
        await until(lambda: errors().keys() == {"w0"})
        await stub.Observe(timings(20, "w1"))  # timings in flight when the watcher left
        assert errors() == {"w0": error}
        again = asyncio.ensure_future(_watch(stub, "w1"))
        await until(lambda: errors().keys() == {"w0", "w1"})
        for task in (again, watching["w0"]):
            task.cancel()
        await until(lambda: not errors())


def test_number_of_workers_in_metrics_is_bounded() -> None:
    registry = CollectorRegistry()
    metrics, model = EstimatorMetrics(registry), CostModel(0.001, 0.001, 0.001, 0.001)
    for number in (*range(MAX_WORKERS_SHOWN), 0, MAX_WORKERS_SHOWN):
        metrics.show(f"w{number}", model, (0.1, 0.2))
    for metric in (catalogue.ERROR, catalogue.BATCH_ERROR, catalogue.ERROR_STEPS):
        samples = [s for f in registry.collect() for s in f.samples if s.name == metric.family]
        workers = {sample.labels["worker"] for sample in samples}
        assert len(workers) == MAX_WORKERS_SHOWN and "w1" not in workers
    for number in range(MAX_WORKERS_SHOWN + 1):
        metrics.hide(f"w{number}")
    assert not [s for f in registry.collect() for s in f.samples if "worker" in s.labels]


async def test_slow_watcher_skips_to_newest() -> None:
    watched = service()
    stream = watched.WatchCostModel(ASK, None)
    for _ in range(5):
        await watched.Observe(timings(20), None)
    assert (await anext(stream)).version == 5
    for _ in range(5):
        await watched.Observe(timings(20), None)
    assert (await anext(stream)).version == 10
    await cast(Any, stream).aclose()  # the stubs call a generator an iterator


@pytest.mark.parametrize("way", WAYS)
async def test_number_of_watchers_is_bounded(way: str) -> None:
    registry = CollectorRegistry()
    async with (
        reaching(way, NAME, ADD, service(registry, watchers_max=1)) as channel,
        asyncio.timeout(20),
    ):
        stub = estimator_pb2_grpc.EstimatorStub(channel)
        await stub.Observe(timings(20))
        watching = asyncio.ensure_future(_watch(stub))
        await until(lambda: registry.get_sample_value("foretoken_estimator_watchers") == 1)
        with pytest.raises(aio.AioRpcError) as caught:
            await anext(aiter(stub.WatchCostModel(ASK)))
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "estimator.watchers_max" in (caught.value.details() or "")

        watching.cancel()
        await until(lambda: registry.get_sample_value("foretoken_estimator_watchers") == 0)
        assert (await anext(aiter(stub.WatchCostModel(ASK)))).version == 1


async def _watch(stub: "estimator_pb2_grpc.EstimatorAsyncStub", worker_id: str = "w0") -> None:
    async for _ in stub.WatchCostModel(estimator_pb2.GetCostModelRequest(worker_id=worker_id)):
        pass


@pytest.mark.parametrize("way", WAYS)
async def test_invalid_input_is_rejected_with_field_name(way: str) -> None:
    async with reaching(way, NAME, ADD, service()) as channel:
        stub = estimator_pb2_grpc.EstimatorStub(channel)
        for call, sentence in (
            (stub.GetCostModel(estimator_pb2.GetCostModelRequest()), "worker_id: must have 1 to"),
            (stub.Observe(timings(5, "w" * 257)), "worker_id: must have 1 to 256 characters"),
            (stub.Observe(timings(1_025)), "timings: at most 1024 per call, got 1025"),
            (
                stub.Observe(swaps(common_pb2.DIRECTION_UPLOAD, *[1] * 1_025)),
                "swaps: at most 1024 per call, got 1025",
            ),
            (
                stub.Observe(
                    estimator_pb2.ObserveTimingsRequest(
                        worker_id="w0", batches=[estimator_pb2.BatchTiming()] * 1_025
                    )
                ),
                "batches: at most 1024 per call, got 1025",
            ),
        ):
            with pytest.raises(aio.AioRpcError) as caught:
                await call
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert sentence in (caught.value.details() or "")


async def test_samples_and_refits_are_counted() -> None:
    registry = CollectorRegistry()
    async with reaching("in-process", NAME, ADD, service(registry)) as channel:
        stub = estimator_pb2_grpc.EstimatorStub(channel)
        broken = common_pb2.StepTiming(decode_seqs=1, elapsed_s=float("nan"))
        request = timings(20)
        unusable = sum(1 for t in request.timings if not t.prefill_tokens and not t.decode_seqs)
        request.timings.append(broken)
        await stub.Observe(request)
    value = registry.get_sample_value
    assert value("foretoken_estimator_samples_total", {"used": "yes"}) == 20 - unusable
    assert value("foretoken_estimator_samples_total", {"used": "no"}) == 1 + unusable
    invalid = {"method": "Observe", "field": "timings.elapsed_s"}
    assert value("foretoken_estimator_invalid_messages_total", invalid) == 1
    assert value("foretoken_estimator_refits_total") == 1


async def test_worker_swap_reports_become_scheduler_prices() -> None:
    scheduler = build_control_plane(
        sections(ServeOptions()), connect("unix:/none"), CollectorRegistry()
    ).scheduler
    workers = scheduler.state.workers
    hello = scheduler_pb2.WorkerHello(
        worker_id="w0", address="unix:/w0", model="demo", block_tokens=16, kv_tokens=1_600,
        max_running=8, max_context_tokens=500, host_tokens=3_200, profile=timings(20).timings,
    )  # fmt: skip
    swapped = scheduler_pb2.Report(
        seq=1, swaps=swaps(common_pb2.DIRECTION_OFFLOAD, *[64] * 3).swaps
    )

    async def messages() -> AsyncIterator[scheduler_pb2.WorkerMessage]:
        yield scheduler_pb2.WorkerMessage(hello=hello)
        yield scheduler_pb2.WorkerMessage(report=swapped)
        await until(lambda: workers["w0"].cost.offload_token_s > 0)
        known.append(workers["w0"])

    known: list[WorkerJobs] = []
    add = scheduler_pb2_grpc.add_SchedulerServicer_to_server
    async with (
        background(scheduler.run()),
        reaching("in-process", "foretoken.v1.Scheduler", add, scheduler) as channel,
        asyncio.timeout(20),
    ):
        async for _ in scheduler_pb2_grpc.SchedulerStub(channel).Attach(messages()):
            pass
    assert known[0].view.host_tokens == 3_200
    assert known[0].cost.offload_token_s == pytest.approx(1e-5)
    assert known[0].cost.upload_token_s == 0
