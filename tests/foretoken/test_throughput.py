"""The throughput line: tokens per second since the last line, goodput of the last minute."""

import sys
from io import StringIO

import pytest
from prometheus_client import CollectorRegistry

from foretoken.running.console.progress import StartProgress
from foretoken.running.console.throughput import ThroughputReport, Totals, parse_totals
from gateway.metrics import Metrics
from gateway.types.errors import RefusalReason
from observability.exposition import Part, expose
from protos.generated import scheduler_pb2
from services.core import Sla
from services.runtime.startup import UP

IDLE = scheduler_pb2.FleetView(workers=[scheduler_pb2.WorkerInfo(kv_tokens=1_000)])
BUSY = scheduler_pb2.FleetView(
    queued=4,
    workers=[
        scheduler_pb2.WorkerInfo(kv_tokens=1_000, held_tokens=900, running=3),
        scheduler_pb2.WorkerInfo(kv_tokens=1_000, held_tokens=100, running=2),
    ],
)


def test_totals_are_parsed_from_real_gateway_metrics() -> None:
    registry = CollectorRegistry()
    metrics = Metrics(registry, {"batch": Sla("batch")})
    metrics.prompt_tokens.inc(11)
    metrics.generation_tokens.inc(22)
    metrics.on_refused(RefusalReason.QUEUE, "batch", 3)
    assert parse_totals(expose([Part(registry, {"model_name": "m"})])) == Totals(11, 22, 0, 3)


def test_throughput_report_is_silent_when_idle() -> None:
    throughput = ThroughputReport()
    assert (
        throughput.update(0.0, Totals(5, 5, 1, 1), BUSY) == ""
    )  # the first update has no interval
    assert throughput.update(10.0, Totals(5, 5, 1, 1), IDLE) == ""
    assert throughput.update(20.0, Totals(105, 2_005, 10, 2), BUSY) == (
        "prompt 10.0 tokens/s, generation 200.0 tokens/s, 5 running, 4 waiting, KV 50%, "
        "goodput 90% of 10 in the last minute"
    )
    # Requests run without a token: the line is printed.
    assert throughput.update(30.0, Totals(105, 2_005, 10, 2), BUSY).startswith(
        "prompt 0.0 tokens/s"
    )
    assert throughput.update(90.0, Totals(205, 2_005, 10, 2), IDLE) == (
        "prompt 1.7 tokens/s, generation 0.0 tokens/s, 0 running, 0 waiting, KV 0%"
    )  # requests that ended before the window are not counted


def test_throughput_report_resets_when_gateway_restarts() -> None:
    throughput = ThroughputReport()
    throughput.update(0.0, Totals(500, 500, 10, 0), BUSY)
    assert throughput.update(10.0, Totals(5, 5, 0, 0), BUSY) == ""
    assert "generation 1.0 tokens/s" in throughput.update(20.0, Totals(5, 15, 0, 0), BUSY)


def test_progress_prints_one_line_per_stage_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stderr = StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    progress = StartProgress()
    for name, stage in [("worker-0", "loading"), ("worker-0", "loading"), ("worker-0", UP)]:
        progress.update(name, stage)
    progress.report("waiting")
    progress.close()
    progress.update("worker-0", "loading again")
    assert stderr.getvalue() == "worker-0: loading\nwaiting\n"
