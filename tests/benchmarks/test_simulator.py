"""The simulator's benchmark: its runs and its workloads."""

import json
from pathlib import Path

import pytest

from benchmarks.simulator.__main__ import Case, draw_workload, main, measure, run


def case(requests: int, rate: float, lengths: Path | None = None) -> Case:
    return Case("fcfs", requests, rate, 2, "h100-llama3-8b", lengths)


def test_simulator_benchmark_runs_a_case_in_a_process_of_its_own() -> None:
    cost = measure(case(20, 0.0))
    assert cost.served_per_s == run(case(20, 0.0)).served_per_s > 0
    assert cost.ms_per_request == cost.cpu_s / 20 * 1e3 > 0
    assert cost.peak_mib > 10


def test_simulator_benchmark_draws_lengths_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "lengths.csv"
    file.write_text("input_tokens,output_tokens\n7,3\n9,5\n")
    drawn = draw_workload(case(50, 10.0, file))
    pairs = zip(drawn.input_tokens.tolist(), drawn.output_tokens.tolist(), strict=True)
    assert set(pairs) == {(7, 3), (9, 5)}
    assert 5 < drawn.rate < 20


@pytest.mark.slow
def test_simulator_benchmark_records_and_plots_its_growth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, plot = tmp_path / "speed.json", tmp_path / "growth.png"
    options = ["--quick", "--presets", "fcfs", "--requests", "10,20", "--workers", "1"]
    monkeypatch.setattr("sys.argv", ["", *options, "--json", str(record), "--plot", str(plot)])
    main()
    runs = json.loads(record.read_text())["runs"]
    assert [(run["label"], run["requests"]) for run in runs] == [
        (label, size)
        for label in ("0.8 x capacity", "1.2 x capacity", "burst")
        for size in (10, 20)
    ]
    assert plot.read_bytes().startswith(b"\x89PNG")
