"""Rounds over several workers, and the benchmark that measures them."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks.fleet import __main__ as fleet
from benchmarks.fleet import live
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
        times = ("round", *PARTS, "publish", "all_round", "all_pass")
        assert all(each[f"{name}_ms"] > 0 for name in times)


def test_workers_report_in_turn():
    scheduler, times = measure("fcfs", 64, 100, turns=8, workers=16, reports=2)
    assert len(times.rounds_ms) == len(times.passes_ms) == 8
    assert len(times.report_us) == 8 * 2
    reports = {worker.report_seq for worker in scheduler.state.workers.values()}
    assert len(reports) == 16 // 2  # each worker in one of eight rounds


def test_rounds_follow_until_no_worker_is_due():
    scheduler, times = measure("fcfs", 64, 100, turns=3, workers=16)
    assert len(times.passes_ms) == 3
    assert len(times.rounds_ms) == 3 * 2  # eight of 16 workers in each
    assert not scheduler.state.rounds.turns.pending


@pytest.mark.slow
def test_scheduler_of_a_live_fleet_is_measured_with_a_full_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    record = tmp_path / "live.json"
    chosen = ["--quick", "--gateways", "2", "--step-s", "0.05", "--seconds", "4"]
    monkeypatch.setattr(sys, "argv", ["live", *chosen, "--json", str(record)])
    live.main()
    figures = json.loads(record.read_text())["fleets"]["foretoken"]
    assert figures["running"] > 30 and figures["waiting"] > 50
    assert figures["round_ms"] > 0 and figures["rounds_per_s"] > 0
    assert 0 < figures["in_target"] <= 1
    assert figures["tokens_per_s"] > 0
