"""Rounds over several workers, and the benchmark that measures them."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import fleet
from benchmarks.harness.rounds import FINISHED, PARTS, _share, measure


def test_running_requests_are_divided_over_the_workers():
    scheduler, times = measure("fcfs", 32, 100, turns=3, workers=4)
    state = scheduler.state
    assert [len(worker.running) for worker in state.workers.values()] == [8] * 4
    assert state.ledger.waiting >= 100
    assert len(times.rounds_ms) == 3
    assert len(times.report_us) == 3 * 4


@pytest.mark.parametrize("workers", [1, 3, 4, 64])
def test_as_many_requests_end_between_two_rounds_on_any_number_of_workers(workers: int):
    assert sum(_share(place, workers) for place in range(workers)) == FINISHED
    scheduler, _ = measure("fcfs", 64, 100, turns=3, workers=workers)
    assert scheduler._count == 64 + 100 + 8 * FINISHED


def test_fleet_benchmark_writes_every_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    record = tmp_path / "fleet.json"
    chosen = ["--presets", "fcfs", "--workers", "1,2", "--size", "16+40", "--turns", "2"]
    monkeypatch.setattr(sys, "argv", ["fleet", *chosen, "--json", str(record)])
    fleet.main()
    figures = json.loads(record.read_text())
    assert set(figures["fleets"]) == {"fcfs/1", "fcfs/2"}
    for each in figures["fleets"].values():
        assert all(each[f"{name}_ms"] > 0 for name in ("round", *PARTS, "publish"))
