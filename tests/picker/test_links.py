"""The picker's links: metrics over HTTP, endpoint files and DNS, and a predictor."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from grpc import aio
from prometheus_client import CollectorRegistry, Counter, Gauge

from observability.exposition import Part
from protos.generated import common_pb2, predictor_pb2, predictor_pb2_grpc
from services.core import FinishReason, Outcome
from services.forecast import Forecast
from services.picker import service
from services.picker.config import PickerConfig
from services.picker.core.endpoints import Reading
from services.picker.core.questions import Question
from services.picker.links.forecasts import Forecasts, History
from services.picker.links.scraper import Scraper
from services.picker.links.sources import EndpointSources
from services.picker.metrics import PickerMetrics
from services.picker.service import PickerService
from services.runtime.config import ConfigError, load
from services.runtime.tasks import background
from services.runtime.telemetry.scrape import metrics_over_http
from tests.reach import reaching, until

OUTCOME = Outcome("r", "m", "", 5, 7, 20, FinishReason.STOP, 1.0, 0)


@dataclass
class Seen:
    """What a scraper reports."""

    readings: list[tuple[str, Reading]] = field(default_factory=list)
    failures: list[tuple[str, str]] = field(default_factory=list)
    counts: list[str] = field(default_factory=list)

    def scraper(self, path: str = "/metrics", limit_s: float = 5.0) -> Scraper:
        return Scraper(
            path,
            0.02,
            limit_s,
            lambda address, reading, _: self.readings.append((address, reading)),
            lambda address, why: self.failures.append((address, why)),
            self.counts.append,
        )


async def test_scraper_reads_a_server_over_and_over_and_reports_its_end() -> None:
    registry, seen = CollectorRegistry(), Seen()
    part = Part(registry)
    for name in ("num_requests_running", "num_requests_waiting"):
        Gauge(f"vllm:{name}", "Requests.", registry=registry).set(3)
    scraper = seen.scraper()
    async with background(scraper.run()):
        async with metrics_over_http("127.0.0.1", 0, [part]) as port:
            scraper.follow([f"127.0.0.1:{port}"])
            await until(lambda: len(seen.readings) > 2)
        await until(lambda: bool(seen.failures))
        assert set(seen.readings) == {(f"127.0.0.1:{port}", Reading(3, 3))}
        scraper.follow([])
    assert {"read", "failed"} <= set(seen.counts)


@asynccontextmanager
async def answering(reply: bytes) -> AsyncIterator[str]:
    """A server that gives every connection the same bytes."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(reply)
        await writer.drain()
        await reader.read()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        (b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n", "its metrics have status 404"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi", "its metrics lack vllm:num_requests"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "the server does not speak HTTP/1.1"),
        (b"", "no metrics within 0.1 s"),
    ],
)
async def test_scraper_says_why_a_server_is_left_out(reply: bytes, problem: str) -> None:
    seen = Seen()
    scraper = seen.scraper(limit_s=0.1)
    async with answering(reply) as address, background(scraper.run()):
        scraper.follow([address])
        await until(lambda: bool(seen.failures))
    assert seen.failures[0][0] == address and seen.failures[0][1].startswith(problem)


async def test_endpoints_follow_their_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, given = tmp_path / "pool.toml", list[list[str]]()
    file.write_text('endpoints = ["10.0.0.1:1"]')
    config = PickerConfig(
        endpoints=("10.0.0.9:1",), endpoints_file=str(file), source_interval_s=0.01
    )
    sources = EndpointSources(config, lambda found: given.append(list(found)))
    assert given == [["10.0.0.9:1", "10.0.0.1:1"]]
    async with background(sources.run()):
        file.write_text("endpoints = [")
        await until(lambda: "not valid TOML" in caplog.text)
        assert given[-1] == ["10.0.0.9:1", "10.0.0.1:1"]
        file.write_text('endpoints = ["10.0.0.2:1", "10.0.0.3:1"]')
        await until(lambda: given[-1] == ["10.0.0.9:1", "10.0.0.2:1", "10.0.0.3:1"])
        assert "read again" in caplog.text


async def test_endpoints_are_resolved_and_bounded(caplog: pytest.LogCaptureFixture) -> None:
    given = list[list[str]]()
    config = PickerConfig(dns="localhost:8000", source_interval_s=0.01)
    async with background(EndpointSources(config, lambda f: given.append(list(f))).run()):
        await until(lambda: "127.0.0.1:8000" in given[-1])
    several = PickerConfig(endpoints=("10.0.0.1:1", "10.0.0.2:1"), max_endpoints=1)
    EndpointSources(several, lambda found: given.append(list(found)))
    assert given[-1] == ["10.0.0.1:1"]
    assert "2 endpoints, the first 1 are used" in caplog.text


async def test_name_that_cannot_be_resolved_is_logged_and_the_file_is_still_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, given = tmp_path / "pool.toml", list[list[str]]()
    file.write_text('endpoints = ["10.0.0.1:1"]')
    config = PickerConfig(
        dns="foo..bar:80", endpoints_file=str(file), source_interval_s=0.01, max_endpoints=1
    )
    async with background(EndpointSources(config, lambda f: given.append(list(f))).run()):
        await until(lambda: "endpoints (dns): encoding with 'idna' codec failed" in caplog.text)
        file.write_text('endpoints = ["10.0.0.2:1", "10.0.0.3:1"]')
        await until(lambda: given[-1] == ["10.0.0.2:1"])
        file.write_text('endpoints = ["10.0.0.3:1"]')
        await until(lambda: given[-1] == ["10.0.0.3:1"])
    pool = [each.getMessage() for each in caplog.records if "(pool)" in each.getMessage()]
    assert pool == [
        "endpoints (pool): 2 endpoints, the first 1 are used (picker.max_endpoints)",
        "endpoints (pool): all are used",
    ]


async def test_file_is_read_while_dns_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hang(*_: Any, **__: Any) -> Any:
        await asyncio.sleep(600)

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", hang)
    file, given = tmp_path / "pool.toml", list[list[str]]()
    file.write_text('endpoints = ["10.0.0.1:1"]')
    config = PickerConfig(dns="host:80", endpoints_file=str(file), source_interval_s=0.01)
    async with background(EndpointSources(config, lambda f: given.append(list(f))).run()):
        file.write_text('endpoints = ["10.0.0.2:1", "10.0.0.3:1"]')
        await until(lambda: given[-1] == ["10.0.0.2:1", "10.0.0.3:1"])


async def test_picker_is_ready_once_an_endpoint_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = CollectorRegistry()
    for name in ("num_requests_running", "num_requests_waiting"):
        Gauge(f"vllm:{name}", "Requests.", registry=registry).set(3)
    async with metrics_over_http("127.0.0.1", 0, [Part(registry)]) as port:
        config = PickerConfig(endpoints=(f"127.0.0.1:{port}",), predictor_address="127.0.0.1:9")
        picker = PickerService(config, registry)
        waiting = asyncio.create_task(picker.ready())
        await asyncio.sleep(0)
        assert not waiting.done()
        async with background(picker.run()):
            await waiting
        assert registry.get_sample_value("foretoken_picker_endpoints", {"health": "ready"}) == 1
    monkeypatch.setattr(service, "READY_S", 0.01)
    await PickerService(config, CollectorRegistry()).ready()  # it does not wait forever


def test_wrong_sources_are_explained(tmp_path: Path) -> None:
    for overrides, sentence in (
        ({"endpoints": '["host:80"]'}, "names are resolved by picker.dns"),
        ({"endpoints_file": "/none.toml"}, "the file does not exist"),
        ({"dns": "host"}, "must be HOST:PORT"),
        ({"dns": "host:99999"}, "with a port from 1 to 65535"),
        ({"dns": "host:²"}, "with a port from 1 to 65535"),
        ({"lost_s": "0.5"}, "lost_s must be at least stale_s"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            load(PickerConfig, overrides)
    with pytest.raises(ConfigError, match="no endpoints: give --endpoint"):
        EndpointSources(PickerConfig(), lambda _: None)
    wrong = tmp_path / "pool.toml"
    wrong.write_text("endpoints = 3")
    with pytest.raises(ConfigError, match="it needs a list"):
        EndpointSources(PickerConfig(endpoints_file=str(wrong)), lambda _: None)


def test_history_forecasts_each_model_by_its_answers() -> None:
    history = History(first_tokens=256)
    assert history.forecast("m", 100).points == (100.0,)
    assert history.forecast("m", 1_000).points == (256.0,)
    history.learn(OUTCOME)
    assert history.forecast("m", 1_000).points == (7.0, 1_000.0)
    assert history.forecast("other", 1_000).points == (256.0,)


@dataclass
class FakePredictor(predictor_pb2_grpc.PredictorServicer):
    """Forecasts 42 tokens, and 21 when it has read the prompt; silent while `late`."""

    late: bool = False
    asked: list[predictor_pb2.ForecastInput] = field(default_factory=list)
    outcomes: list[predictor_pb2.Outcome] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)  # without an outcome
    improved: asyncio.Queue[str] = field(default_factory=asyncio.Queue)

    async def Forecast(self, request: Any, context: Any) -> predictor_pb2.ForecastResponse:
        if self.late:
            await asyncio.sleep(600)
        self.asked += request.inputs
        return predictor_pb2.ForecastResponse(forecasts=[common_pb2.Forecast(points=[42.0])])

    async def Improve(self, request: Any, context: Any) -> Any:
        while True:
            name = await self.improved.get()
            better = common_pb2.Forecast(points=[21.0])
            yield predictor_pb2.ImprovedForecasts(
                request_ids=[name, "foreign"], forecasts=[better, better]
            )

    async def Observe(self, request: Any, context: Any) -> predictor_pb2.ObserveOutcomesResponse:
        self.outcomes += request.outcomes
        self.ended += request.ended_ids
        return predictor_pb2.ObserveOutcomesResponse(version=1)


@asynccontextmanager
async def forecasting(
    predictor: FakePredictor, better: list[tuple[int, Forecast]], **settings: Any
) -> AsyncIterator[tuple[Forecasts, Counter]]:
    add = predictor_pb2_grpc.add_PredictorServicer_to_server
    metrics = PickerMetrics(CollectorRegistry(), lambda: {}, lambda: 0)
    channel: aio.Channel
    async with reaching("socket", "foretoken.v1.Predictor", add, predictor) as channel:
        config = PickerConfig(forecast_failures_max=2, **settings)
        forecasts = Forecasts(
            config, channel, metrics, lambda number, each: better.append((number, each))
        )
        async with background(forecasts.run()):
            yield forecasts, metrics.fallbacks


async def test_predictor_forecasts_improves_and_learns() -> None:
    predictor, better = FakePredictor(), list[tuple[int, Forecast]]()
    async with forecasting(predictor, better, forecast_wait_s=20.0) as (forecasts, _):
        question = Question("m", b"", "Be brief.", "Hello")
        made = await forecasts.forecast(3, question, 5, 30)
        assert made.points == (30.0,)  # cut at max_tokens
        (asked,) = predictor.asked
        assert (asked.model, asked.prompt_tokens, asked.max_tokens) == ("m", 5, 30)
        assert (asked.text.instruction, asked.text.user_input) == ("Be brief.", "Hello")
        predictor.improved.put_nowait(asked.request_id)
        await until(lambda: bool(better))
        assert [(number, each.points) for number, each in better] == [(3, (21.0,))]
        forecasts.learn(OUTCOME)
        await until(lambda: bool(predictor.outcomes))
        assert predictor.outcomes[0].output_tokens == 7
        await forecasts.forecast(4, question, 5, 30)
        for number in (4, 4, 5):  # 5 was not asked about
            forecasts.drop(number)
        await until(lambda: bool(predictor.ended))
        assert predictor.ended == [forecasts.name(4)]


async def test_predictor_forgets_a_request_that_leaves_before_its_forecast() -> None:
    predictor = FakePredictor(late=True)
    async with forecasting(predictor, [], forecast_wait_s=20.0) as (forecasts, _):
        waiting = asyncio.create_task(forecasts.forecast(1, Question("m"), 5, 1_000))
        await asyncio.sleep(0)  # it asks
        waiting.cancel()
        await until(lambda: predictor.ended == [forecasts.name(1)])


async def test_history_forecasts_while_the_predictor_is_late() -> None:
    predictor = FakePredictor(late=True)
    async with forecasting(predictor, [], forecast_wait_s=0.01) as (forecasts, fallbacks):
        forecasts.learn(OUTCOME)
        for number in range(4):
            made = await forecasts.forecast(number, Question("m"), 5, 1_000)
            assert made.source == "history"
        counts = {
            sample.labels["reason"]: sample.value
            for family in fallbacks.collect()
            for sample in family.samples
            if sample.name.endswith("_total")
        }
        assert counts["late"] >= 2 and counts["late"] + counts["open"] == 4
