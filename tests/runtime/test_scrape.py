"""The metrics of a process over its gRPC server and over HTTP."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from http.client import HTTPConnection
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Gauge

from foretoken.running.ports import free_port
from observability.exposition import CONTENT_TYPE, Part
from protos.generated import telemetry_pb2, telemetry_pb2_grpc
from services.runtime.config import ConfigError
from services.runtime.network.channel import connect
from services.runtime.server import listening
from services.runtime.telemetry.scrape import metrics_over_http

TEXT = '# HELP a Say é.\n# TYPE a gauge\na{worker="w"} 1.0\n'


def parts() -> list[Part]:
    registry = CollectorRegistry()
    Gauge("a", "Say é.", registry=registry).set(1)
    return [Part(registry, {"worker": "w"})]


@pytest.fixture
async def port() -> AsyncIterator[int]:
    async with metrics_over_http("127.0.0.1", 0, parts()) as chosen:
        yield chosen


async def scrape(address: str) -> str:
    channel = connect(address)
    try:
        stub = telemetry_pb2_grpc.TelemetryStub(channel)
        answer = await stub.Scrape(telemetry_pb2.ScrapeRequest(), wait_for_ready=True, timeout=60)
        return answer.text
    finally:
        await channel.close()


async def ask(port: int, method: str, path: str) -> tuple[int, str | None, str]:
    def exchange() -> tuple[int, str | None, str]:
        connection = HTTPConnection("127.0.0.1", port, timeout=30)
        try:
            connection.request(method, path)
            answer = connection.getresponse()
            return answer.status, answer.getheader("content-type"), answer.read().decode()
        finally:
            connection.close()

    return await asyncio.to_thread(exchange)


async def test_every_server_exposes_its_metrics() -> None:
    async with listening([], "127.0.0.1:0", parts()) as server:
        assert await scrape(f"127.0.0.1:{server.port}") == TEXT
    async with listening([], "127.0.0.1:0") as server:
        assert await scrape(f"127.0.0.1:{server.port}") == ""


async def test_metrics_over_http_equal_grpc(port: int) -> None:
    for path in ("/metrics", "/metrics?name[]=a"):
        assert await ask(port, "GET", path) == (200, CONTENT_TYPE, TEXT)
    assert (await ask(port, "GET", "/"))[0] == 404
    assert (await ask(port, "POST", "/metrics"))[0] == 405


@pytest.mark.parametrize(
    "message", [b"", b"\r\n\r\n", b"GET\r\n\r\n", b"\xff" * 200_000, b"GET /met"]
)
async def test_silent_connection_does_not_block_scrapes(port: int, message: bytes) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(message)
    assert await ask(port, "GET", "/metrics") == (200, CONTENT_TYPE, TEXT)
    writer.close()


async def test_metrics_port_in_use_is_a_one_line_error(port: int) -> None:
    with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port} for metrics: "):
        async with metrics_over_http("127.0.0.1", port, []):
            pass


async def test_service_process_exposes_metrics_on_loopback_only(
    tmp_path: Path,
) -> None:
    address, port = f"unix:{tmp_path / 's.sock'}", free_port()
    settings = {"address": address, "metrics_port": port}
    sets = [part for k, v in settings.items() for part in ("--set", f"estimator.{k}={v}")]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.estimator", *sets
    )
    try:
        text = await scrape(address)
        assert "\nforetoken_estimator_refits_total 0.0\n" in text
        assert await ask(port, "GET", "/metrics") == (200, CONTENT_TYPE, text)
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.2", port)  # another address of this machine
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
