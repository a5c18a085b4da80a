"""Errors of a twin, worked out by hand, and its report."""

from dataclasses import replace
from io import StringIO
from math import isnan
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from services.core import Request, Sla
from simulator.engine.records import Records
from simulator.engine.settings import Timing
from simulator.rows import write_rows
from simulator.twin.comparison import Figure, compare
from simulator.twin.recorded_run import RecordedRun
from simulator.twin.report import twin_rows, twin_table
from simulator.twin.step_ends import WorkerSteps
from tests.simulator.fixtures import workload

SLA = Sla("quick", ttft_s=1.5)


def run(first_s: list[float], last_s: list[float], ids: list[str]) -> RecordedRun:
    """Requests that arrive at 0 s, with 11 tokens each."""
    count = len(ids)
    records = Records(count)
    records.arrival_s[:] = 0.0
    records.first_s[:], records.last_s[:] = first_s, last_s
    records.tokens[:], records.finished[:] = 11, True
    requests = replace(
        workload([(0.0, 5, 11)] * count),
        requests=[Request(name, "m", 5, 50, 0.0, sla=SLA) for name in ids],
    )
    steps = (WorkerSteps(),)
    return RecordedRun((), requests, records, tuple(ids), 1, (), (None,), steps, Timing(), 0.0)


def test_errors_match_worked_example():
    """TTFT 1, 2 and 3 s against 1.1, 1 and 3 s: errors of 10 %, 50 % and 0 %. TPOT 0.1 s each
    against 0.11, 0.1 and 0.1 s. The last token comes at 4 s in both, so makespan is equal. The SLA
    of 1.5 s is met by one request of three, and by two in the twin. The second request of the log
    did not finish in the twin."""
    measured = run([1.0, 9.0, 2.0, 3.0], [2.0, 10.0, 3.0, 4.0], ["a", "lost", "b", "c"])
    simulated = run([1.1, 1.0, 3.0], [2.2, 2.0, 4.0], ["0", "2", "3"])
    found = compare(measured, simulated)
    assert (found.requests, found.left_out) == (3, 2)
    ttft = found.latencies["ttft_s"]
    assert ttft.median == Figure(2.0, 1.1)
    assert ttft.median.error == pytest.approx(-0.45)
    assert ttft.mean.error == pytest.approx(5.1 / 6 - 1)
    assert ttft.request_error_p50 == pytest.approx(0.1)
    assert ttft.request_error_p99 == pytest.approx(0.1 + 0.98 * 0.4)
    tpot = found.latencies["tpot_s"]
    assert tpot.median.error == pytest.approx(0, abs=1e-9)
    assert tpot.p99.measured == pytest.approx(0.1)
    assert tpot.p99.simulated == pytest.approx(0.1 + 0.98 * 0.01)
    assert found.makespan_s == Figure(4.0, 4.0)
    assert found.tokens_per_s == Figure(33 / 4, 33 / 4)
    assert found.goodput == Figure(1 / 3, 2 / 3)
    assert found.worst_median == pytest.approx(0.45)
    relaxed = compare(measured, simulated, Sla("relaxed", ttft_s=5.0))
    assert relaxed.goodput == Figure(1.0, 1.0)


def test_error_of_a_zero_figure_is_not_a_number():
    assert Figure(0.0, 0.0).error == 0.0
    assert isnan(Figure(0.0, 1.0).error)


def test_report_has_a_row_for_each_figure(tmp_path: Path):
    one = run([1.0, 2.0], [2.0, 3.0], ["0", "1"])
    found = compare(one, one, Sla("none met", ttft_s=0.5))
    rows = twin_rows(found)
    assert len({row["figure"] for row in rows}) == len(rows) == 3 * 5 + 4
    assert {row["error"] for row in rows} == {0.0}
    write_rows(tmp_path / "rows.json", rows)
    console = Console(width=120, record=True, file=StringIO())
    console.print(twin_table(found, "title"))
    assert "goodput" in console.export_text()


def test_places_of_a_twin_are_its_ids():
    assert np.array_equal(run([1.0], [1.0], ["7"]).places, [7])
