"""Twins of simulated runs, written as event logs: no error, and the same actions when replayed."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from services.costs import StepTiming
from services.policies.preset import presets
from services.scheduler.core.admission import SchedulerLimits
from services.scheduler.core.state import SchedulerState
from services.scheduler.observe.event_log import EventLog, Head, read, read_head
from services.scheduler.observe.replay import replay
from simulator.engine.settings import Timing
from simulator.engine.simulation import Simulation
from simulator.twin.comparison import compare
from simulator.twin.recorded_run import read_run
from simulator.twin.twin import fit_mean_cost, measured_hardware, simulate_twin
from tests.simulator.fixtures import SMALL, random_workload, settings
from tests.simulator.twin.twin_fixtures import write_simulated

COLUMNS = ("first_s", "last_s", "longest_gap_s")
LOADED = Timing(0.002, 0.004, 0.0005, 2e-6, wake_s=0.0007)


@pytest.mark.parametrize("preset", sorted(presets()))
def test_simulated_event_log_replays_to_the_same_bytes(tmp_path: Path, preset: str):
    """The served scheduler takes the simulated events and gives the same actions."""
    path, again = tmp_path / "simulated", tmp_path / "replayed"
    write_simulated(path, settings(preset, workers=2), random_workload(7, 30, 20.0))
    assert replay(path, 0).differing == 0
    head = read_head(path)
    state = SchedulerState(head.preset, head.limits, head.apart)
    with EventLog(again, 2**26, head) as log:
        for step in read(path):
            state.step(step.event, step.now)
            log.append(state.last_step)
    assert again.read_bytes() == path.read_bytes()


@pytest.mark.parametrize("preset", ["fcfs", "past-future", "srtf", "alise", "scls", "foretoken"])
@pytest.mark.parametrize("workers", [1, 2])
def test_twin_of_a_simulated_run_has_no_error(tmp_path: Path, preset: str, workers: int):
    """Swaps, evictions, slices and static batches included."""
    made = settings(preset, workers=workers, timing=LOADED)
    write_simulated(tmp_path / "log", made, random_workload(5, 60, 25.0))
    recorded = read_run(tmp_path / "log")
    twin = simulate_twin(recorded, made.hardware, LOADED)
    for column in COLUMNS:
        measured, simulated = (getattr(r.records, column) for r in (recorded.run, twin))
        assert simulated == pytest.approx(measured, abs=1e-9), column
    comparison = compare(recorded.run, twin)
    assert comparison.requests == 60 and comparison.left_out == 0
    assert comparison.makespan_s.error == pytest.approx(0, abs=1e-9)
    assert comparison.goodput.error == 0
    assert max(c.request_error_p99 for c in comparison.latencies.values()) < 1e-6


def test_log_gives_tokens_the_times_of_their_steps(tmp_path: Path):
    """The times read from a log are those of the simulation and one message later, as reports are;
    fcfs without pauses and without shortage of memory."""
    hardware = replace(SMALL, kv_tokens=100_000, max_running=64)
    made = settings("fcfs", hardware, timing=LOADED)
    result = write_simulated(tmp_path / "log", made, random_workload(9, 50, 30.0))
    run = read_run(tmp_path / "log").run
    assert run.workload.arrival_s.tolist() == result.workload.arrival_s.tolist()
    for column in ("first_s", "last_s"):
        expected = getattr(result.records, column)
        assert getattr(run.records, column) == pytest.approx(expected, abs=1e-9)


def test_hardware_and_latencies_of_a_simulated_run_are_found_again(tmp_path: Path):
    made = settings("past-future", timing=LOADED)
    write_simulated(tmp_path / "log", made, random_workload(3, 150, 4.0))
    run = read_run(tmp_path / "log").run
    [found] = measured_hardware(run)
    for name in ("base_s", "prefill_token_s", "decode_seq_s", "context_token_s"):
        assert getattr(found.cost, name) == pytest.approx(getattr(SMALL.cost, name), rel=1e-3), name
    assert found.cost.upload_token_s == SMALL.cost.upload_token_s
    assert (found.kv_tokens, found.host_tokens) == (SMALL.kv_tokens, SMALL.host_tokens)
    assert found.max_batch_tokens == SMALL.max_batch_tokens
    for name in ("hop_s", "forecast_s", "round_s", "round_job_s", "wake_s"):
        assert getattr(run.timing, name) == pytest.approx(getattr(LOADED, name), rel=1e-2), name


def test_mean_cost_keeps_the_total_time_of_noisy_steps():
    """A base of 10 ms and 1 ms per row; every tenth step takes twice as long."""
    rows = np.random.default_rng(1).integers(1, 9, 400)
    timings = [
        StepTiming(0, int(n), 0, (0.010 + 0.001 * n) * (2 if step % 10 == 0 else 1))
        for step, n in enumerate(rows)
    ]
    cost = fit_mean_cost(timings)
    total_s = sum(cost.step_s(0, t.decode_seqs, 0) for t in timings)
    assert total_s == pytest.approx(sum(t.elapsed_s for t in timings))
    assert cost.base_s > 0.010


def test_twin_with_a_named_predictor_forecasts_anew(tmp_path: Path):
    made = settings("srtf", timing=LOADED)
    write_simulated(tmp_path / "log", made, random_workload(5, 60, 25.0))
    recorded = read_run(tmp_path / "log")
    twins = [simulate_twin(recorded, made.hardware, LOADED, name) for name in ("", "max")]
    assert twins[0].records.first_s.tolist() != twins[1].records.first_s.tolist()


def test_twin_follows_the_speed_of_the_machine(tmp_path: Path):
    """Steps take three times as long between the 2nd and the 4th second. A twin at constant speed
    does not know when."""
    made = settings("fcfs", timing=LOADED)
    head = Head(made.preset, SchedulerLimits(patience_s=0.0))

    def slowdown(now: float) -> float:
        return 3.0 if 2 < now < 4 else 1.0

    with EventLog(tmp_path / "log", 2**26, head) as log:
        requests = random_workload(5, 80, 12.0)
        Simulation(made, requests, log.append, slowdowns=[slowdown]).run()
    recorded = read_run(tmp_path / "log")
    hardware = measured_hardware(recorded.run)
    errors = []
    for follow in (False, True):
        twin = simulate_twin(recorded, hardware, LOADED, follow_speed=follow)
        found = compare(recorded.run, twin)
        errors.append(found.latencies["e2e_s"].request_error_p50)
    assert errors[1] < 0.05 < 0.15 < errors[0]
