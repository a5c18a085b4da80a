"""The aggregated `/metrics`: peers that answer, are missing, hang, and return."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from grpc import aio
from prometheus_client import CollectorRegistry, Counter, Gauge

from gateway.config import GatewayConfig
from gateway.peers.metrics_aggregator import MetricsAggregator
from observability.exposition import Part
from protos.generated import telemetry_pb2, telemetry_pb2_grpc
from services.runtime.config import ConfigError, load
from services.runtime.network.channel import connect
from services.runtime.server import listening
from tests.gateway.gateway_fakes import run_harness
from tests.reach import until

NOT_IN_TIME_S = 30.0


@dataclass
class SlowPeer(telemetry_pb2_grpc.TelemetryServicer):
    """A peer that answers once `released` is set."""

    released: asyncio.Event = field(default_factory=asyncio.Event)
    scrapes_received: int = 0

    async def Scrape(
        self, request: telemetry_pb2.ScrapeRequest, context: object
    ) -> telemetry_pb2.ScrapeResponse:
        self.scrapes_received += 1
        await self.released.wait()
        return telemetry_pb2.ScrapeResponse(text="slow 1.0\n")


def counter_part(name: str, worker: str) -> Part:
    registry = CollectorRegistry()
    Counter(name, "Counted.", registry=registry).inc()
    return Part(registry, {"worker": worker})


def gauge_part(name: str, value: float, worker: str = "0") -> Part:
    registry = CollectorRegistry()
    Gauge(name, "Measured.", registry=registry).set(value)
    return Part(registry, {"worker": worker})


@asynccontextmanager
async def scraping(
    peers: Sequence[str], wait_s: float = NOT_IN_TIME_S, age_s: float = 0.0
) -> AsyncIterator[MetricsAggregator]:
    config = GatewayConfig(metrics_peers=tuple(peers), metrics_wait_s=wait_s, metrics_age_s=age_s)
    registry = CollectorRegistry()
    missing = Gauge("missing", "Peers.", registry=registry)
    scrapes = MetricsAggregator(config, [Part(registry)], connect, [missing])
    try:
        yield scrapes
    finally:
        await scrapes.close()


async def wait_for_samples(scrapes: MetricsAggregator, expected: list[str]) -> None:
    """Waits for these samples; a returning peer is not found at once."""
    async with asyncio.timeout(NOT_IN_TIME_S):
        while samples(await scrapes.text()) != expected:  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.02)


def samples(text: bytes) -> list[str]:
    return [line for line in text.decode().splitlines() if not line.startswith("#")]


async def test_metrics_of_all_peers_are_merged_and_a_missing_one_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gateway.peers.metrics_aggregator")
    first, second = (f"unix:{tmp_path}/{name}.sock" for name in "ab")
    async with (
        listening([], first, [counter_part("x", "0")]),
        scraping([first, second]) as scrapes,
    ):
        alone = ["missing 1.0", 'x_total{worker="0"} 1.0']
        assert samples(await scrapes.text()) == alone
        assert samples(await scrapes.text()) == alone
        assert [f"/metrics omits {second}" in line for line in caplog.messages] == [True]
        async with listening([], second, [counter_part("x", "1"), counter_part("y", "1")]):
            both = ["missing 0.0", *alone[1:], 'x_total{worker="1"} 1.0', 'y_total{worker="1"} 1.0']
            await wait_for_samples(scrapes, both)
        [back] = caplog.records[1:]
        assert back.getMessage() == f"/metrics includes {second} again"
        assert back.levelname == "INFO"


async def test_a_scrape_by_name_has_only_these_series(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/w.sock"
    parts = [gauge_part("foretoken_num_requests_running", 3), counter_part("y", "0")]
    async with listening([], address, parts), scraping([address]) as scrapes:
        own = 'foretoken_num_requests_running{worker="0"} 3.0'
        vllm = 'vllm:num_requests_running{worker="0"} 3.0'
        assert samples(await scrapes.text(["vllm:num_requests_running"])) == [own, vllm]
        both = await scrapes.text(["foretoken_num_requests_running", "y_total"])
        assert samples(both) == [own, 'y_total{worker="0"} 1.0', vllm]
        assert samples(await scrapes.text(["none_of_them"])) == []
        async with run_harness(metrics_peers=(address,)) as harness:
            reply = await harness.http("GET", "/metrics?name[]=vllm:num_requests_running")
            assert 'vllm:num_requests_running{worker="0"} 3.0' in samples(reply.text.encode())
            assert not any("y_total" in line for line in samples(reply.text.encode()))
            many = "&".join(f"name[]={number}" for number in range(65))
            assert (await harness.http("GET", f"/metrics?{many}")).status == 400


async def test_scrape_of_a_hanging_peer_times_out() -> None:
    peer = SlowPeer()
    async with served(peer) as address, scraping([address], 0.2) as scrapes:
        began_s = time.monotonic()
        assert samples(await scrapes.text()) == ["missing 1.0"]
        assert time.monotonic() - began_s >= 0.2
        peer.released.set()
        await wait_for_samples(scrapes, ["missing 0.0", "slow 1.0"])


async def test_concurrent_scrapes_share_one_query_per_peer() -> None:
    peer = SlowPeer()
    async with served(peer) as address, scraping([address]) as scrapes:
        pending = [asyncio.create_task(scrapes.text()) for _ in range(50)]
        await until(lambda: bool(peer.scrapes_received))
        pending[0].cancel()
        peer.released.set()
        reported = await asyncio.gather(*pending[1:])
        assert peer.scrapes_received == 1
        assert {tuple(samples(text)) for text in reported} == {("missing 0.0", "slow 1.0")}


async def test_peers_are_asked_once_in_a_time_and_own_series_are_current() -> None:
    registry = CollectorRegistry()
    own, peer = Counter("own", "Counted.", registry=registry), SlowPeer()
    peer.released.set()
    async with served(peer) as address:
        for age_s, asked in ((5.0, 1), (0.0, 4)):
            config = GatewayConfig(metrics_peers=(address,), metrics_age_s=age_s)
            missing = Gauge("missing", "Peers.", registry=None)
            scrapes = MetricsAggregator(config, [Part(registry)], connect, [missing])
            peer.scrapes_received = 0
            for _ in range(4):
                own.inc()
                count = registry.get_sample_value("own_total")
                assert samples(await scrapes.text()) == [f"own_total {count}", "slow 1.0"]
            assert peer.scrapes_received == asked
            if age_s:  # another set of names is another question
                assert samples(await scrapes.text(["slow"])) == ["slow 1.0"]
                assert peer.scrapes_received == asked + 1
            await scrapes.close()


async def test_metrics_of_peers_are_never_older_than_the_bound() -> None:
    registry = CollectorRegistry()
    level = Gauge("level", "Measured.", registry=registry)
    async with listening([], "127.0.0.1:0", [Part(registry)]) as server:
        address = f"127.0.0.1:{server.port}"
        async with scraping([address], age_s=0.05) as scrapes:
            for value in range(1, 4):
                level.set(value)
                await asyncio.sleep(0.06)
                assert f"level {value}.0" in samples(await scrapes.text())


@asynccontextmanager
async def served(peer: SlowPeer) -> AsyncIterator[str]:
    """On a plain server, because the project's servers have the service already."""
    server = aio.server()
    telemetry_pb2_grpc.add_TelemetryServicer_to_server(peer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def test_metrics_page_has_peers_and_vllm_aliases_of_pickers_or_all(
    tmp_path: Path,
) -> None:
    address = f"unix:{tmp_path}/w.sock"
    async with listening([], address, [counter_part("foretoken_prefix_cache_hits", "0")]):
        for vllm in (False, True):
            async with run_harness(metrics_peers=(address,), vllm_metrics=vllm) as harness:
                reply = await harness.http("GET", "/metrics")
                lines = reply.text.splitlines()
                assert reply.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
                assert 'foretoken_prefix_cache_hits_total{worker="0"} 1.0' in lines
                assert 'foretoken_metrics_peers_missing{model_name="demo"} 0.0' in lines
                assert ('vllm:prefix_cache_hits_total{worker="0"} 1.0' in lines) is vllm
                assert 'vllm:num_requests_running{model_name="demo"} 0.0' in lines  # pickers'


def test_misspelt_role_of_a_peer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"gateway\.metrics_peers: .*'wroker' is no role; write "):
        load(GatewayConfig, {"metrics_peers": '["worker=10.0.0.7:1", "wroker=10.0.0.8:1"]'})
