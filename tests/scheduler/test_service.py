"""The scheduler's servicer over a real socket, with peers absent or simulated."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

import grpc
import pytest
from grpc import aio

from observability.metrics import scheduler as catalogue
from protos.generated import (
    batcher_pb2,
    batcher_pb2_grpc,
    common_pb2,
    scheduler_pb2,
)
from services.runtime.network.channel import connect
from services.scheduler.core.ledger import UNMEASURED
from tests.observability.metrics.seen import uncatalogued, unseen
from tests.reach import reaching, until
from tests.scheduler.served import (
    PROFILE,
    Live,
    Stream,
    cancelled,
    fleets,
    run_step,
    running,
    submitted,
)


async def test_reattached_worker_gets_its_cost_model() -> None:
    async with running() as live:
        workers = live.service.state.workers
        for _ in range(2):
            worker = live.worker(profile=PROFILE)
            await until(lambda: "w" in workers and workers["w"].cost is not UNMEASURED)
            assert workers["w"].cost.samples > 0
            worker.leave()
            await worker.reading
            await until(lambda: "w" not in workers)


async def test_simultaneous_requests_make_few_rounds() -> None:
    """One call forecasts all requests, and one round places them."""
    async with running() as live:
        live.texts.may.set()
        live.worker()
        await until(lambda: "w" in live.service.state.workers)
        await settled(live)
        rounds = live.service.state.rounds.number
        for number in range(100):
            live.service._submit("unknown#1", submitted(f"r{number}").request)
        await until(lambda: live.service.state.ledger.running == 100)
        assert live.service.state.rounds.number - rounds <= 3


async def settled(live: Live) -> None:
    """Whether no round is due."""
    await until(lambda: live.service.state.round_due_s == float("inf"))


async def test_fleet_updates_are_periodic_and_only_on_change() -> None:
    interval_s = 0.1
    async with running(fleet_interval_s=interval_s) as live:
        gateway = live.gateway()
        await until(lambda: len(fleets(gateway)) == 1)
        started_s = time.monotonic()
        for number in range(50):
            gateway.say(submitted(f"r{number}"))
            await asyncio.sleep(0.005)
        await until(lambda: live.service.state.ledger.waiting == 50)
        await until(lambda: fleets(gateway)[-1].queued >= 45)  # a change by a tenth is not sent
        most = (time.monotonic() - started_s) / interval_s + 1
        assert 1 < len(fleets(gateway)) <= 1 + most
        heard = len(fleets(gateway))
        await asyncio.sleep(3 * interval_s)
        assert len(fleets(gateway)) == heard
        gateway.say(cancelled("r0"))  # a change by one of fifty is not sent
        await until(lambda: live.service.state.ledger.waiting == 49)
        await asyncio.sleep(3 * interval_s)
        assert len(fleets(gateway)) == heard


async def test_worker_change_sends_fleet_at_once() -> None:
    async with running(fleet_interval_s=60.0) as live:
        gateway = live.gateway()
        await until(lambda: len(fleets(gateway)) == 1)
        worker = live.worker()
        await until(lambda: [w.worker_id for w in fleets(gateway)[-1].workers] == ["w"])
        worker.leave()
        await until(lambda: len(fleets(gateway)[-1].workers) == 0)


async def test_duplicate_worker_name_ends_first_stream() -> None:
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
        assert live.value("workers_attached") == 1
        assert live.value("workers_lost_total") == 1


async def test_series_of_lost_worker_are_removed() -> None:
    async with running() as live:
        first, second = live.worker("w"), live.worker("v")
        await until(lambda: live.value("workers_attached") == 2)
        assert live.value("scheduler_admissions_total", worker="w") == 0
        first.leave()
        await until(lambda: live.value("scheduler_admissions_total", worker="w") is None)
        assert live.value("workers_attached") == 1
        assert live.value("scheduler_admissions_total", worker="v") == 0
        assert not second.reading.done()


async def test_a_waiting_request_is_bounded_by_its_forecast() -> None:
    async with running() as live:
        gateway = live.gateway()
        plain, bounded = submitted("plain"), submitted("bounded")
        bounded.request.length_quantile = 0.95
        gateway.say(plain)
        gateway.say(bounded)
        live.texts.may.set()
        await until(lambda: run_step(gateway, "length_bound") == ["bounded"])
        event = next(each.request for each in gateway.heard if each.HasField("request"))
        assert event.length_bound.output_tokens == 10


async def test_every_metric_is_exported() -> None:
    async with running() as live:
        live.texts.may.set()
        worker, gateway = live.worker(), live.gateway()
        await until(lambda: bool(gateway.heard) and "w" in live.service.state.workers)
        hasty = submitted("r")
        hasty.request.sla.CopyFrom(common_pb2.Sla(name="hasty", ttft_s=1e-6))
        gateway.say(hasty)
        await until(lambda: run_step(gateway, "placed") == ["r"])
        report = scheduler_pb2.Report(seq=1, applied_plan_seq=1)
        worker.say(scheduler_pb2.WorkerMessage(report=report))
        await until(lambda: live.value("scheduler_plan_age_seconds_count") == 1)
        assert unseen(live.registry, catalogue.ALL) == []
        assert uncatalogued(live.registry, catalogue.ALL) == set()
        assert live.value("predicted_infeasible_total", **{"class": "hasty"}) == 1
        assert live.value("slack_at_admission_seconds_count", **{"class": "hasty"}) == 1
        preset = live.service.state.preset.name
        assert live.value("scheduler_preset", preset=preset) == 1
        assert live.value("forecast_breaker", phase="closed") == 1


def kept(live: Live) -> set[str]:
    """Ids for which the service keeps data for forecasts."""
    forecasts = live.service._peers.forecasts
    return {*forecasts._texts, *forecasts._questions, *forecasts._max_tokens}


async def test_ended_requests_leave_no_state_in_service() -> None:
    async with running() as live:
        live.texts.may.set()
        worker, gateway = live.worker(), live.gateway()
        await until(lambda: bool(gateway.heard) and "w" in live.service.state.workers)
        gateway.say(submitted("no model", model="unknown"))
        await until(lambda: run_step(gateway, "rejected") == ["no model"])
        assert kept(live) == set()
        gateway.say(submitted("r0"))
        gateway.say(submitted("r1"))
        await until(lambda: len(run_step(gateway, "placed")) == 2)
        assert kept(live) == {"r0", "r1"}
        gateway.say(cancelled("r0"))
        await until(lambda: kept(live) == {"r1"})
        done = scheduler_pb2.FinishedRequest(
            request_id="r1", output_tokens=3, reason=common_pb2.FINISH_REASON_STOP
        )
        report = scheduler_pb2.Report(seq=1, applied_plan_seq=1, finished=[done])
        worker.say(scheduler_pb2.WorkerMessage(report=report))
        await until(lambda: run_step(gateway, "finished") == ["r1"])
        assert kept(live) == set()
        await until(lambda: live.texts.observed == 1)
        assert live.texts.ended == ["r0"]
        gateway.say(submitted("r2"))
        await until(lambda: kept(live) == {"r2"})
        gateway.leave()
        await until(lambda: live.texts.ended == ["r0", "r2"])
        assert kept(live) == set()


async def test_duplicate_id_leaves_forecast_of_live_request() -> None:
    """The first call is pending; later questions wait for the next."""
    async with running() as live:
        live.worker()
        gateway = live.gateway()
        await until(lambda: bool(gateway.heard) and "w" in live.service.state.workers)
        gateway.say(submitted("first"))
        await until(lambda: live.texts.heard == ["first"])
        gateway.say(submitted("twin"))
        gateway.say(submitted("twin"))
        await until(lambda: run_step(gateway, "rejected") == ["twin"])
        live.texts.may.set()
        await until(lambda: run_step(gateway, "placed") == ["first", "twin"])
        assert live.texts.heard == ["first", "twin"]


# A batcher process


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
async def test_failing_batcher_does_not_stop_serving(
    batcher: type[batcher_pb2_grpc.BatcherServicer],
) -> None:
    add = batcher_pb2_grpc.add_BatcherServicer_to_server
    async with reaching("socket", "foretoken.v1.Batcher", add, batcher()) as channel:
        await served_by(channel, ("late", "gone"))


async def test_absent_batcher_does_not_stop_serving() -> None:
    channel = connect("unix:/absent")
    await served_by(channel, ("gone",))
    await channel.close()


def has_placed(gateway: Stream, count: int) -> bool:
    return len(run_step(gateway, "placed")) == count


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


async def test_hand_over_refuses_and_cancels_nothing() -> None:
    """Streams end and workers get no cancel: gateways submit their requests to the next
    scheduler."""
    async with running() as live:
        live.texts.may.set()
        worker, gateway = live.worker(), live.gateway()
        await until(lambda: "w" in live.service.state.workers)
        for name in ("a", "b"):
            gateway.say(submitted(name))
        await until(lambda: len(run_step(gateway, "placed")) == 2)
        await live.service.hand_over()
        async with asyncio.timeout(10):
            await asyncio.gather(worker.reading, gateway.reading)
        assert (worker.ended, gateway.ended) == (None, None)
        assert not [plan for plan in worker.heard if plan.cancel]
        assert not run_step(gateway, "rejected") and not run_step(gateway, "finished")
        late = live.gateway()
        await late.reading
        assert late.ended is not None and late.ended.code() is grpc.StatusCode.UNAVAILABLE


async def test_wind_up_delivers_outcomes() -> None:
    async with running() as live:
        live.texts.may.set()
        worker, gateway = live.worker(), live.gateway()
        await until(lambda: "w" in live.service.state.workers)
        gateway.say(submitted("a"))
        await until(lambda: run_step(gateway, "placed") == ["a"])
        winding = asyncio.ensure_future(live.service.wind_up())
        done = scheduler_pb2.FinishedRequest(
            request_id="a", output_tokens=9, reason=common_pb2.FINISH_REASON_STOP
        )
        report = scheduler_pb2.Report(seq=1, applied_plan_seq=1, finished=[done])
        worker.say(scheduler_pb2.WorkerMessage(report=report))
        async with asyncio.timeout(10):
            await winding
        assert live.texts.observed == 1


async def test_draining_worker_receives_no_requests() -> None:
    async with running() as live:
        worker = live.worker()
        await until(lambda: "w" in live.service.state.workers)
        message = scheduler_pb2.WorkerDraining(drain_s=30.0)
        worker.say(scheduler_pb2.WorkerMessage(draining=message))
        await until(lambda: live.service.state.workers["w"].draining)
