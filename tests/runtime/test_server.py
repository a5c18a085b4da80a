"""The gRPC server of all services: health, reflection, errors, limits and shutdown."""

import asyncio
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest
from grpc import ChannelConnectivity, StatusCode, aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from prometheus_client import CollectorRegistry

from protos.generated import batcher_pb2, batcher_pb2_grpc, estimator_pb2_grpc, predictor_pb2_grpc
from services.batcher.config import BatcherConfig
from services.batcher.service import BatcherService
from services.estimator.config import EstimatorConfig
from services.estimator.service import EstimatorService
from services.predictor.config import PredictorConfig
from services.predictor.service import PredictorService
from services.runtime.config import ConfigError
from services.runtime.network.channel import OPTIONS, connect
from services.runtime.server import Lifecycle, Mount, listening
from tests.reach import until

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def mounts() -> list[Mount]:
    registry = CollectorRegistry()
    return [
        Mount(
            "foretoken.v1.Predictor",
            predictor_pb2_grpc.add_PredictorServicer_to_server,
            PredictorService(PredictorConfig(), registry),
        ),
        Mount(
            "foretoken.v1.Estimator",
            estimator_pb2_grpc.add_EstimatorServicer_to_server,
            EstimatorService(EstimatorConfig(), registry),
        ),
        Mount(
            "foretoken.v1.Batcher",
            batcher_pb2_grpc.add_BatcherServicer_to_server,
            BatcherService(BatcherConfig(), registry),
        ),
    ]


async def health(channel: aio.Channel, service: str = "") -> int:
    request = health_pb2.HealthCheckRequest(service=service)
    stub: Any = health_pb2_grpc.HealthStub(channel)
    answer = await stub.Check(request)
    return int(answer.status)


async def test_health_answers_for_the_server_and_each_service() -> None:
    async with listening(mounts(), "127.0.0.1:0") as server:
        channel = connect(f"127.0.0.1:{server.port}")
        for service in ("", "foretoken.v1.Predictor", "foretoken.v1.Batcher"):
            assert await health(channel, service) == SERVING
        server.set_serving(False)
        for service in ("", "foretoken.v1.Estimator"):
            assert await health(channel, service) == NOT_SERVING
        await channel.close()


async def test_health_watch_follows_the_status_until_the_server_stops() -> None:
    seen: dict[str, list[int]] = {"": [], "foretoken.v1.Predictor": [], "no.such.Service": []}

    async def watch(channel: aio.Channel, service: str) -> None:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        async for answer in stub.Watch(health_pb2.HealthCheckRequest(service=service)):
            seen[service].append(answer.status)

    async with listening(mounts(), "127.0.0.1:0", serving=False) as server:
        channel = connect(f"127.0.0.1:{server.port}")
        watches = [asyncio.ensure_future(watch(channel, service)) for service in seen]
        await until(lambda: all(seen.values()))
        server.set_serving(True)
        await until(lambda: seen[""][-1] == seen["foretoken.v1.Predictor"][-1] == SERVING)
    await asyncio.gather(*watches)
    await channel.close()
    unknown = seen.pop("no.such.Service")
    assert unknown == [health_pb2.HealthCheckResponse.SERVICE_UNKNOWN]
    assert [each[:2] for each in seen.values()] == [[NOT_SERVING, SERVING]] * 2


async def test_health_of_an_unknown_service_is_not_found() -> None:
    async with listening(mounts(), "127.0.0.1:0") as server:
        channel = connect(f"127.0.0.1:{server.port}")
        with pytest.raises(aio.AioRpcError) as refused:
            await health(channel, "no.such.Service")
        assert refused.value.code() is StatusCode.NOT_FOUND
        await channel.close()


async def test_server_cancelled_during_its_start_ends_quietly() -> None:
    """Cancelled after 0, 1, 2, … turns of the event loop, until it has started."""
    errors: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, about: errors.append(about))

    async def serve(started: asyncio.Event) -> None:
        async with listening(mounts(), "127.0.0.1:0"):
            started.set()
            await asyncio.Event().wait()

    started = asyncio.Event()
    for turns in range(100):
        if started.is_set():
            break
        serving = asyncio.create_task(serve(started))
        for _ in range(turns):
            await asyncio.sleep(0)
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving
        await asyncio.sleep(0.01)
    assert started.is_set()
    assert not errors


@pytest.mark.slow
async def test_idle_client_with_pings_stays_connected() -> None:
    """By default a server disconnects a client after three pings within five idle minutes."""
    often = {**dict(OPTIONS), "grpc.keepalive_time_ms": 1_200}
    async with listening(mounts(), "127.0.0.1:0") as server:
        channel = aio.insecure_channel(f"127.0.0.1:{server.port}", options=list(often.items()))
        assert await health(channel) == SERVING
        ready = ChannelConnectivity.READY
        assert channel.get_state() is ready
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(channel.wait_for_state_change(ready), timeout=8)
        await channel.close()


async def test_reflection_lists_the_services() -> None:
    async with listening(mounts(), "127.0.0.1:0") as server:
        channel = connect(f"127.0.0.1:{server.port}")
        stub: Any = cast(Any, reflection_pb2_grpc).ServerReflectionStub(channel)
        request = cast(Any, reflection_pb2).ServerReflectionRequest(list_services="")
        async for answer in stub.ServerReflectionInfo(iter([request])):
            names = {service.name for service in answer.list_services_response.service}
        await channel.close()
    assert names >= {f"foretoken.v1.{n}" for n in ("Predictor", "Estimator", "Batcher")}
    assert "grpc.health.v1.Health" in names


async def test_grpc_port_in_use_is_a_one_line_error() -> None:
    async with listening(mounts(), "127.0.0.1:0") as server:
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{server.port}"):
            async with listening(mounts(), f"127.0.0.1:{server.port}"):
                pass


async def test_used_unix_socket_is_refused_and_a_stale_one_replaced(tmp_path: Path) -> None:
    address = f"unix:{tmp_path / 's.sock'}"
    async with listening(mounts(), address):
        channel = connect(address)
        assert await health(channel) == SERVING
        await channel.close()
        with pytest.raises(ConfigError, match="another process listens on it"):
            async with listening(mounts(), address):
                pass
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(tmp_path / "s.sock"))
    async with listening(mounts(), address):
        channel = connect(address)
        assert await health(channel) == SERVING
        await channel.close()


async def test_first_signal_drains_the_server_and_second_aborts() -> None:
    lifecycle = Lifecycle()
    lifecycle.signal()
    assert (lifecycle.draining.is_set(), lifecycle.aborting.is_set()) == (True, False)
    assert await lifecycle.drain(asyncio.sleep(0), limit_s=5)

    endless = asyncio.ensure_future(lifecycle.drain(asyncio.sleep(60), limit_s=60))
    await asyncio.sleep(0)
    lifecycle.signal()
    assert not await asyncio.wait_for(endless, 5)
    assert not await Lifecycle().drain(asyncio.sleep(60), limit_s=0.01)


class _SlowReader(batcher_pb2_grpc.BatcherServicer):
    """Reads its next message only after its server has stopped."""

    def __init__(self) -> None:
        self.began, self.stopped, self.ended = (asyncio.Event() for _ in range(3))

    async def Arrange(self, requests: Any, context: object) -> Any:
        try:
            async for _ in requests:
                self.began.set()
                with suppress(asyncio.CancelledError):
                    await self.stopped.wait()
                await self.stopped.wait()
            yield batcher_pb2.Arrangement()
        finally:
            self.ended.set()


async def test_call_that_outlasts_its_server_is_not_a_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    late = _SlowReader()
    add = batcher_pb2_grpc.add_BatcherServicer_to_server
    async with listening([Mount("foretoken.v1.Batcher", add, late)], "127.0.0.1:0") as server:
        channel = connect(f"127.0.0.1:{server.port}")
        stub: Any = batcher_pb2_grpc.BatcherStub(channel)
        call = stub.Arrange()
        await call.write(batcher_pb2.ArrangeMessage())
        await asyncio.wait_for(late.began.wait(), 30)
    late.stopped.set()
    await asyncio.wait_for(late.ended.wait(), 30)
    await asyncio.sleep(0)
    await channel.close()
    assert not [each for each in caplog.records if each.exc_info]


@pytest.mark.parametrize("service", ["predictor", "estimator", "batcher"])
async def test_service_process_exits_on_sigterm(service: str, tmp_path: Path) -> None:
    address = f"unix:{tmp_path / 's.sock'}"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", f"services.{service}", "--set", f"{service}.address={address}"
    )
    channel = connect(address)
    try:
        async with asyncio.timeout(60):
            await _served(channel)
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0
    finally:
        await channel.close()
        if process.returncode is None:
            process.kill()


async def _served(channel: aio.Channel) -> None:
    """Returns when the server is healthy."""
    stub: Any = health_pb2_grpc.HealthStub(channel)
    answer = await stub.Check(health_pb2.HealthCheckRequest(), wait_for_ready=True)
    assert answer.status == SERVING
