"""The error matrix: separate errors of the loads in one log, and its tables."""

from pathlib import Path

import pytest

from benchmarks.twin import HEAD, Cell, as_record, compare_loads, last_row, markdown, table_row
from simulator.engine.settings import Timing
from simulator.twin.recorded_run import read_run
from tests.simulator.fixtures import SMALL, random_workload, settings
from tests.simulator.twin.twin_fixtures import write_simulated


def test_loads_of_a_log_are_compared_separately(tmp_path: Path):
    made = settings("fcfs", timing=Timing(round_job_s=0.0))
    write_simulated(tmp_path / "log", made, random_workload(5, 60, 4.0))
    recorded = read_run(tmp_path / "log")
    found = list(compare_loads(recorded, SMALL, [10, 20, 30]))
    for load, requests in zip(found, (20, 30), strict=True):
        for comparison in load.values():
            assert comparison.requests == requests
            assert comparison.makespan_s.error == pytest.approx(0, abs=1e-3)
    makespan_s = found[0]["calibrated"].makespan_s.measured
    records = recorded.run.records
    assert makespan_s == records.last_s[10:30].max() - records.arrival_s[10]


def test_table_and_record_have_a_cell_for_each_figure(tmp_path: Path):
    write_simulated(tmp_path / "log", settings("fcfs"), random_workload(5, 30, 4.0))
    [twins] = compare_loads(read_run(tmp_path / "log"), SMALL, [10, 20])
    row = table_row(Cell("cpu", "fcfs", 0.9, twins, 0.1), twins["own steps"])
    assert len(row) == len(HEAD) and row[:3] == ["cpu", "fcfs", "0.9"]
    assert len(last_row([twins["own steps"]] * 3)) == len(HEAD)
    head, rule, line = markdown(HEAD, [row]).splitlines()
    assert head.count("|") == rule.count("|") == line.count("|") == len(HEAD) + 1
    record = as_record(twins["own speed"])
    assert record["requests"] == 20
    assert isinstance(record["ttft_s_p99"], dict)
