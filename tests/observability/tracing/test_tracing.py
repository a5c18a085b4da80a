"""Spans and metrics exported to a collector, and the loss of the collector."""

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest
from pydantic import ValidationError

from foretoken import AsyncClient
from foretoken.running.ports import free_port
from observability.collector import EXPORTERS, QUEUES, Outage
from observability.genai import REQUEST_DURATION
from observability.otel import OtelTracing, unix_ns
from observability.tracing import NO_SPAN, NO_SPANS, OFF
from services.runtime.config import check_environment, load
from services.runtime.outcomelog.config import LogConfig
from services.runtime.telemetry.logs import LoggingConfig
from services.runtime.telemetry.tracing import TracingConfig
from tests.gateway.gateway_fakes import run_harness, tokens_of
from tests.live import wait_for
from tests.observability.tracing.otlp import Collector, collecting

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00"


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as made:
        yield made


def tracing_to(address: str, **settings: float) -> OtelTracing:
    config = TracingConfig.model_validate({"endpoint": address, "delay_s": 0.05, **settings})
    made = config.open()
    assert isinstance(made, OtelTracing)
    return made


def test_client_trace_is_continued(collector: Collector) -> None:
    now_s = time.monotonic()
    with closing(tracing_to(collector.address)) as tracing:
        gateway, worker = tracing.service("gateway"), tracing.service("worker")
        asked = {"traceparent": SAMPLED, "tracestate": "vendor=1"}
        request = gateway.begin_request(
            "chat demo", asked, now_s - 2, {"n": 1, "names": ["a", "b"]}
        )
        worker.record("slice", request.traceparent, now_s - 1, now_s, {"tokens": 3})
        request.put({"late": 0.5})
        request.mark("half", now_s - 1)
        request.fail("it broke")
        request.end(now_s)
    by_name = {span.name: span for span in collector.spans}
    chat, part = by_name["chat demo"], by_name["slice"]
    assert (chat.trace_id, chat.parent_id) == (TRACE, PARENT)
    assert (part.trace_id, part.parent_id) == (TRACE, chat.span_id)
    assert (chat.service, part.service) == ("foretoken-gateway", "foretoken-worker")
    assert chat.attributes == {"n": 1, "names": ["a", "b"], "late": 0.5}
    assert (chat.events, chat.failed) == (("half",), "it broke")
    assert chat.end_ns - chat.start_ns == pytest.approx(2e9, abs=1e7)  # the clocks differ in rate
    assert part.end_ns == pytest.approx(unix_ns(now_s), abs=1e9)
    assert request.traceparent.startswith(f"00-{TRACE}-{chat.span_id}-")


def test_client_sampling_decision_overrides_the_share(collector: Collector) -> None:
    with closing(tracing_to(collector.address, sample=0.0)) as tracing:
        spans = tracing.service("gateway")
        for carrier in ({}, {"traceparent": UNSAMPLED}, {"traceparent": "nonsense"}):
            left_out = spans.begin_request("out", carrier, 0.0, {})
            assert left_out.traceparent == "" and len(left_out.trace_id) == 32
            assert spans.begin("below", left_out.traceparent, 0.0) is NO_SPAN
            left_out.end(1.0)
        spans.begin_request("in", {"traceparent": SAMPLED}, 0.0, {}).end(1.0)
    assert [span.name for span in collector.spans] == ["in"]
    collector.spans.clear()
    with closing(tracing_to(collector.address)) as tracing:
        tracing.service("gateway").begin_request("out", {"traceparent": UNSAMPLED}, 0.0, {}).end(
            1.0
        )
    assert not collector.spans


@pytest.mark.parametrize(("sample", "kept"), [(0.0, []), (1.0, ["in", "out"])])
def test_untrusted_client_keeps_its_trace_id_only(
    sample: float, kept: list[str], collector: Collector
) -> None:
    with closing(tracing_to(collector.address, sample=sample, trust_clients=False)) as tracing:
        spans, worker = tracing.service("gateway"), tracing.service("worker")
        for name, parent in (("in", SAMPLED), ("out", UNSAMPLED)):
            request = spans.begin_request(name, {"traceparent": parent}, 0.0, {})
            assert request.trace_id == TRACE
            worker.record("slice", request.traceparent, 0.0, 1.0)  # internal spans are trusted
            request.end(1.0)
    assert [span.name for span in collector.spans if span.name != "slice"] == kept
    assert len(collector.of(TRACE)) == len(collector.spans) == 2 * len(kept)


def test_configured_share_is_sampled(collector: Collector) -> None:
    with closing(tracing_to(collector.address, sample=0.25)) as tracing:
        spans = tracing.service("gateway")
        for _ in range(1_000):
            spans.begin_request("r", {}, 0.0, {}).end(1.0)
    assert 150 < len(collector.spans) < 350  # 7 standard deviations either way


@pytest.mark.parametrize("parent", ["", "nonsense", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"])
def test_empty_parent_has_no_span(parent: str, collector: Collector) -> None:
    with closing(tracing_to(collector.address)) as tracing:
        assert tracing.service("worker").begin("slice", parent, 0.0) is NO_SPAN
    assert not collector.spans


def test_metrics_include_unsampled_requests(collector: Collector) -> None:
    with closing(tracing_to(collector.address, sample=0.0)) as tracing:
        for seconds in (0.03, 0.5, 0.5, 700.0):
            reported = {"gen_ai.request.model": "demo"}
            tracing.service("gateway").measure(REQUEST_DURATION, seconds, reported)
    [(attributes, point)] = collector.points["gen_ai.server.request.duration"]
    assert attributes == {"gen_ai.request.model": "demo"}
    assert tuple(point.explicit_bounds) == REQUEST_DURATION.buckets
    assert point.count == 4 and point.sum == pytest.approx(701.03)
    assert point.bucket_counts[2] == 1 and point.bucket_counts[6] == 2  # to 0.04, to 0.64
    assert point.bucket_counts[-1] == 1


def test_metric_is_created_once_across_threads(collector: Collector) -> None:
    threads, each = 8, 50
    with closing(tracing_to(collector.address)) as tracing:
        together = threading.Barrier(threads)

        def measure(_: int) -> None:
            together.wait()
            spans = tracing.service("gateway")
            for _ in range(each):
                spans.measure(REQUEST_DURATION, 0.5, {})

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(measure, range(threads)))
        assert len(tracing._metrics) == 1
    [(_, point)] = collector.points["gen_ai.server.request.duration"]
    assert point.count == threads * each


def test_several_tracings_coexist(collector: Collector) -> None:
    with (
        collecting() as other,
        closing(tracing_to(collector.address)) as one,
        closing(tracing_to(other.address)) as two,
    ):
        one.service("gateway").begin_request("one", {}, 0.0, {}).end(1.0)
        two.service("gateway").begin_request("two", {}, 0.0, {}).end(1.0)
        wait_for(lambda: bool(collector.spans and other.spans))
    assert [span.name for span in collector.spans] == ["one"]
    assert [span.name for span in other.spans] == ["two"]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


async def test_missing_collector_is_logged_once_and_requests_are_served(
    caplog: pytest.LogCaptureFixture,
) -> None:
    address = f"127.0.0.1:{free_port()}"
    tracing = tracing_to(address, queue_spans=8, timeout_s=0.2, metrics_interval_s=0.1)
    async with (
        run_harness(lambda _: tokens_of("abc"), spans=tracing.service("gateway")) as house,
        AsyncClient(house.grpc_address) as client,
    ):
        for _ in range(20):
            assert (await client.complete("Copy: abc\n", max_tokens=3)).text == "abc"
        await house.until(lambda: bool(warnings(caplog)))
        processor: Any = tracing._processor
        assert len(processor._batch_processor._queue) <= 8
        for _ in range(5):
            assert (await client.complete("Copy: abc\n", max_tokens=3)).text == "abc"
    tracing.close()
    [line] = warnings(caplog)
    assert line.startswith("cannot export ") and f"to the collector at http://{address} (" in line
    assert "UNAVAILABLE" in line


def test_returned_collector_receives_new_spans(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    outage = Outage("http://x")
    for signal, arrived in (
        ("traces", True), ("traces", False), ("metrics", False), ("traces", False),
        ("traces", True), ("metrics", True), ("traces", True), ("traces", False),
    ):  # fmt: skip
        outage.record_export(signal, arrived)
    outage.close()
    message = [each.getMessage().split(" (")[0] for each in caplog.records]
    assert message == [
        "cannot export traces to the collector at http://x",
        "the collector at http://x accepts exports again",
        "cannot export traces to the collector at http://x",
    ]


def test_dropped_spans_are_logged_after_recovery(
    caplog: pytest.LogCaptureFixture,
) -> None:
    queues = logging.getLogger(QUEUES)
    outage = Outage("http://x")
    queues.warning("Queue full, dropping %s.", "Span")
    assert not caplog.records
    for _ in range(2):
        outage.record_export("traces", True)
    [line] = warnings(caplog)
    assert line.startswith("spans were dropped because the collector at http://x accepts them too")
    queues.error("Exception while exporting %s.", "Span")  # a bug is logged unchanged
    outage.close()
    assert len(caplog.records) == 2


def test_two_tracings_log_their_own_collector(
    caplog: pytest.LogCaptureFixture,
) -> None:
    exporters, queues = logging.getLogger(EXPORTERS), logging.getLogger(QUEUES)
    one, two = Outage("http://one:1"), Outage("http://two:2")
    exporters.error("Failed to export traces to %s", "one:1")
    exporters.error("Failed to export traces to %s", "two:2")
    queues.warning("Queue full, dropping %s.", "Span")  # does not name the exporter
    assert not caplog.records
    for outage in (one, two):
        outage.record_export("traces", True)
        outage.record_export("traces", False)
    message = warnings(caplog)
    assert ["too slowly" in line for line in message] == [True, False, True, False]
    assert "to one:1" in message[1] and "to two:2" in message[3]
    one.close()
    queues.warning("Queue full, dropping %s.", "Span")  # the other outage still receives it
    assert len(caplog.records) == 4
    two.close()
    queues.warning("Queue full, dropping %s.", "Span")
    assert len(caplog.records) == 5


def test_disabled_tracing_creates_nothing() -> None:
    assert TracingConfig().open() is OFF
    assert OFF.service("gateway") is NO_SPANS and not NO_SPANS.on
    assert NO_SPANS.begin_request("r", {"traceparent": SAMPLED}, 0.0, {}) is NO_SPAN
    assert NO_SPANS.begin("r", SAMPLED, 0.0) is NO_SPAN


OFF_IMPORTS = """
import sys
import gateway.__main__, services.scheduler.__main__, services.predictor.__main__
import services.estimator.__main__, services.batcher.__main__, services.worker.__main__
from services.runtime.telemetry.tracing import open_tracing
open_tracing()
ours = ("opentelemetry.sdk", "opentelemetry.exporter")
print([name for name in sys.modules if name.startswith(ours)])
"""


@pytest.mark.slow
def test_disabled_tracing_imports_no_sdk() -> None:
    command = [sys.executable, "-c", OFF_IMPORTS]
    message = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert message.stdout.strip() == "[]"


@pytest.mark.parametrize(("key", "value"), [("sample", 1.5), ("sample", -0.1), ("queue_spans", 0)])
def test_invalid_tracing_settings_are_errors(key: str, value: float) -> None:
    with pytest.raises(ValidationError, match=key):
        TracingConfig.model_validate({key: value})


def test_tracing_settings_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORETOKEN_TRACING_ENDPOINT", "collector:4317")
    monkeypatch.setenv("FORETOKEN_TRACING_SAMPLE", "0.25")
    monkeypatch.setenv("FORETOKEN_LOGGING_FORMAT", "json")
    check_environment()
    tracing = load(TracingConfig)
    assert (tracing.endpoint, tracing.sample) == ("collector:4317", 0.25)
    assert tracing.trust_clients
    assert load(LoggingConfig).format == "json"
    assert load(LogConfig) == LogConfig()  # the outcome log is another section
