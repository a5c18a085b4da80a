"""The benchmark on traces: windows, memories and the share of the oracle, on a small trace."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.traces import MOST_TOKENS, ORACLE, make_point, make_rows, names, prepare
from simulator.study import run_points
from simulator.workload.recording import write_trace
from simulator.workload.workload import Workload

REQUESTS = 30


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Sixty requests, one of them longer than the benchmark admits."""
    rng = np.random.default_rng(1)
    outputs = rng.integers(2, 200, 60)
    outputs[30] = MOST_TOKENS
    made = Workload("trace", np.arange(60) / 2, rng.integers(50, 500, 60), outputs)
    write_trace(tmp_path / "trace.csv", made)
    return tmp_path / "trace.csv"


def test_traces_benchmark_has_a_tight_and_an_ample_memory(trace: Path) -> None:
    tight, ample = prepare(trace, "small", REQUESTS, 0)
    window = tight.window
    tokens = window.input_tokens + window.output_tokens
    assert len(window) == len(window.forecasts) == REQUESTS
    assert tokens.max() <= MOST_TOKENS and window.arrival_s[0] == 0
    assert ample.hardware.kv_tokens >= tokens.sum()
    assert tokens.max() < tight.hardware.kv_tokens < ample.hardware.kv_tokens / 2
    assert tight.capacity > 0 and ample.capacity > 0


@pytest.mark.slow
def test_traces_benchmark_compares_goodput_with_true_lengths(trace: Path) -> None:
    tight, ample = prepare(trace, "small", REQUESTS, 0)
    runs = [(name, each, 1.6) for each in (tight, ample) for name in ("fcfs", "srtf", ORACLE)]
    found = run_points([make_point(*run, seed=0) for run in runs], 1)
    rows = make_rows([(*run, each.summary) for run, each in zip(runs, found, strict=True)])
    assert [(row["preset"], row["memory"]) for row in rows] == [
        (name, each.memory) for name, each, _ in runs
    ]
    for row in rows:
        assert row["finished"] == REQUESTS and row["rejected"] == 0
        if row["preset"] == ORACLE:
            assert row["of_oracle"] == 1.0
        if row["memory"] == "ample":
            assert row["evictions"] == 0
    assert make_rows([(*runs[0], found[0].summary)])[0]["of_oracle"] is None


def test_traces_benchmark_has_every_preset_for_continuous_batches() -> None:
    assert {"fcfs", "past-future", "alise", "ltr", "mlfq", "srtf", "foretoken", ORACLE} < {*names()}
    assert "scls" not in names() and "magnus" not in names()
