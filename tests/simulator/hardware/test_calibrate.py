"""Calibration against an engine with known costs, and the command."""

import csv
import gzip
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from foretoken.__main__ import app
from services.costs import CostModel, StepTiming
from simulator.hardware.calibrate import calibrate, calibrate_log, calibrate_steps
from simulator.hardware.hardware_file import load_hardware
from simulator.hardware.reconstruct import (
    PAUSED_SHARE,
    RECOMPUTED_SHARE,
    decode_phases,
    missed_steps,
    peak_load,
)
from simulator.hardware.request_log import LOG_COLUMNS, RequestLog, read_timings
from simulator.hardware.roofline import Roofline, derive_bounds
from tests.simulator.hardware.oracle_engine import serve

COST = CostModel(0.013, 4e-5, 2e-5, 9e-8)
STEPS = [
    StepTiming(p, d, c, COST.step_s(p, d, c))
    for p, d, c in [(16, 0, 16), (512, 0, 512), (200, 8, 4_000), (64, 2, 300)] * 3
    + [(0, n, n * m) for n in (1, 4, 16, 64) for m in (20, 300, 2_000)]
]
MEASURED = Path(os.environ.get("FORETOKEN_SHARED_DATA", "")) / "calib"


def requests(count: int, rate: float, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    arrival_s = np.cumsum(rng.exponential(1 / rate, count))
    return arrival_s, rng.integers(50, 2_500, count), rng.integers(50, 500, count)


@pytest.fixture(scope="module")
def log() -> RequestLog:
    return serve(COST, *requests(150, 3.0, 1))[0]


def test_oracle_engine_matches_worked_transcript():
    """Budget 10: step 1 computes all of A's 4 tokens and 6 of B's 8, step 2 the other 2."""
    log, _ = serve(
        CostModel(1.0, 0.1, 0.01, 0.001),
        np.zeros(2),
        np.array([4, 8]),
        np.array([3, 2]),
        budget=10,
    )
    first = 1 + 0.1 * 10 + 0.001 * 10
    second = first + 1 + 0.1 * 2 + 0.01 + 0.001 * (5 + 8)
    third = second + 1 + 0.01 * 2 + 0.001 * (6 + 9)
    assert log.scheduled_s.tolist() == [0, 0]
    assert log.first_token_s.tolist() == pytest.approx([first, second])
    assert log.last_token_s.tolist() == pytest.approx([third, third])


def test_calibration_of_a_log_recovers_its_costs(log):
    found = calibrate_log(log)
    assert found.cost.base_s == pytest.approx(COST.base_s, rel=0.05)
    assert found.cost.prefill_token_s == pytest.approx(COST.prefill_token_s, rel=0.05)
    assert found.cost.error_p50 < 0.005
    assert found.cost.error_p90 < 0.02
    assert found.held_out > 10
    for load in ((0, 4, 4_000), (0, 16, 20_000), (500, 8, 9_000), (0, 32, 45_000)):
        assert found.cost.step_s(*load) == pytest.approx(COST.step_s(*load), rel=0.02)


def test_calibration_averages_noisy_steps():
    log, _ = serve(COST, *requests(150, 3.0, 2), noise=0.2)
    found = calibrate_log(log)
    for load in ((0, 4, 4_000), (0, 16, 20_000), (500, 8, 9_000)):
        assert found.cost.step_s(*load) == pytest.approx(COST.step_s(*load), rel=0.08)


def test_calibration_excludes_paused_requests():
    """Memory for a third of the load: those that the engine evicted after their first token."""
    log, evicted = serve(COST, *requests(150, 3.0, 3), kv_tokens=16_000)
    flagged = set(np.flatnonzero(missed_steps(log) > PAUSED_SHARE).tolist())
    assert len(evicted) > 15
    assert len(flagged & evicted) >= 0.7 * len(evicted)
    assert len(flagged - evicted) <= 0.1 * len(log)
    found = calibrate_log(log)
    assert found.paused == len(flagged)
    for load in ((0, 10, 12_000), (200, 10, 12_000)):
        assert found.cost.step_s(*load) == pytest.approx(COST.step_s(*load), rel=0.08)


def test_calibration_finds_no_paused_request_with_ample_memory(log):
    missed = missed_steps(log)
    assert (missed > PAUSED_SHARE).sum() <= 0.1 * len(log)
    assert (missed > RECOMPUTED_SHARE).sum() == 0


def test_request_log_phases_count_every_token(log):
    """A request that spans all others covers all their tokens, whatever the clock."""
    spanning = RequestLog(
        *(np.append(log.columns[name], value) for name, value in zip(
            LOG_COLUMNS, (1.0, 1e5, 0.0, 0.0, log.last_token_s.max()), strict=True
        ))
    )  # fmt: skip
    none_missed = np.zeros(len(spanning))
    for cost in (None, COST):
        work = decode_phases(spanning, none_missed, cost).work[-1]
        assert work[0] == 1e5 - 1
        assert work[1] == pytest.approx(log.input_tokens.sum())
        assert work[2] == pytest.approx((spanning.output_tokens - 1).sum())
        outputs, prompts = spanning.output_tokens, spanning.input_tokens
        read = prompts * (outputs - 1) + (outputs**2 - 1) / 2
        assert work[3] == pytest.approx(read.sum() + log.input_tokens.sum())


def test_calibrated_costs_are_at_least_the_bounds(log):
    bounds = CostModel(0.014, 0.0, 0.0, 1e-7)
    cost = calibrate_log(log, bounds).cost
    assert cost.base_s >= 0.014
    assert cost.context_token_s >= 1e-7


def test_peak_load_counts_concurrent_requests_and_tokens():
    log = RequestLog(*np.array([[100, 100], [10, 10], [0, 5], [1, 6], [11, 16]], float))
    assert peak_load(log) == (2, 215)


def test_calibration_of_step_timings_recovers_their_costs():
    found = calibrate_steps(STEPS)
    assert (found.fitted, found.held_out, found.rows) == (18, 6, "steps")
    assert found.cost.error_p90 < 1e-4
    assert found.cost.step_s(100, 10, 5_000) == pytest.approx(COST.step_s(100, 10, 5_000), rel=1e-3)


@settings(max_examples=20)
@given(st.floats(1e-4, 0.1), st.floats(1e-6, 1e-3), st.floats(1e-6, 1e-3), st.floats(1e-9, 1e-6))
def test_calibration_of_step_timings_recovers_any_costs(base, prefill, decode, context):
    cost = CostModel(base, prefill, decode, context)
    timings = [
        replace(t, elapsed_s=cost.step_s(t.prefill_tokens, t.decode_seqs, t.context_tokens))
        for t in STEPS
    ]
    found = calibrate_steps(timings).cost
    for t in timings:
        expected = found.step_s(t.prefill_tokens, t.decode_seqs, t.context_tokens)
        assert expected == pytest.approx(t.elapsed_s, rel=0.01)


def test_calibration_refuses_too_little_data(log):
    with pytest.raises(ValueError, match="8 steps do not determine the cost model"):
        calibrate_steps(STEPS[-8:])
    few = RequestLog(*(column[:10] for column in log.columns.values()))
    with pytest.raises(ValueError, match=r"requests with several tokens .* are too few to fit"):
        calibrate_log(few)


def write_csv(path: Path, log: RequestLog) -> Path:
    rows = [",".join(("kind", *LOG_COLUMNS))]
    rows += [",".join(("chat", *map(repr, row))) for row in zip(*log.columns.values(), strict=True)]
    text = "\n".join(rows).replace("np.float64(", "").replace(")", "") + "\n"
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.mark.parametrize("name", ["log.csv", "log.csv.gz"])
def test_request_log_is_read_plain_or_compressed(tmp_path, log, name):
    found = read_timings(write_csv(tmp_path / name, log))
    assert isinstance(found, RequestLog)
    for column in LOG_COLUMNS:
        assert np.array_equal(found.columns[column], log.columns[column])


HEADER = ",".join(LOG_COLUMNS) + "\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "a,b\n1,2\n",
            " needs the columns input_tokens, output_tokens, scheduled_s, ",
        ),
        (HEADER + "5,2,0,1,x\n", ", line 2: last_token_s must be a number, got 'x'"),
        (HEADER + "5,2,0,1\n", ", line 2: 4 of 5 columns"),
        (HEADER, " has no rows"),
        (HEADER + "5,2,0,1,2\n5,2,3,1,2\n", ": request 2: scheduled_s, first_token_s and last_"),
        (HEADER + "0,2,0,1,2\n", ": request 1: input_tokens and output_tokens must be at least 1"),
        (HEADER + "5,2,0,1,1\n", ": request 1: more than one output token takes time"),
    ],
)
def test_request_log_error_names_file_line_and_value(tmp_path, text, message):
    file = tmp_path / "log.csv"
    file.write_text(text)
    with pytest.raises(ValueError) as error:
        read_timings(file)
    assert message in str(error.value), str(error.value)
    assert str(error.value).startswith(str(file))


def test_calibrate_command_writes_a_hardware_file(tmp_path, log):
    out = tmp_path / "mine.toml"
    file = str(write_csv(tmp_path / "log.csv", log))
    run = CliRunner().invoke(
        app, ["calibrate", "--log", file, "--name", "mine", "--out", str(out)]
    )  # fmt: skip
    assert run.exit_code == 0, run.output
    assert "decode phases of log.csv." in run.output
    hardware = load_hardware(out)
    assert hardware.cost == replace(
        calibrate(log, CostModel(0, 0, 0, 0)).cost, source=hardware.source
    )
    assert hardware.kv_tokens == peak_load(log)[1]
    assert "measured on" in hardware.source


def test_calibrate_command_bounds_the_fit_by_a_gpu(tmp_path, log):
    out = tmp_path / "mine.toml"
    file = str(write_csv(tmp_path / "log.csv", log))
    given = ["--gpu", "rtx4090", "--model", "llama3-8b"]
    run = CliRunner().invoke(
        app, ["calibrate", "--log", file, "--name", "mine", "--out", str(out), *given]
    )
    assert run.exit_code == 0, run.output
    bounds = derive_bounds(Roofline(gpu="rtx4090", model="llama3-8b"))
    assert load_hardware(out).cost.base_s >= bounds.base_s


def test_calibrate_command_requires_a_capacity_with_step_timings(tmp_path):
    steps = tmp_path / "steps.csv"
    rows = [f"{t.prefill_tokens},{t.decode_seqs},{t.context_tokens},{t.elapsed_s}" for t in STEPS]
    steps.write_text("\n".join(["prefill_tokens,decode_seqs,context_tokens,elapsed_s", *rows]))
    out = tmp_path / "mine.toml"
    command = ["calibrate", "--log", str(steps), "--name", "mine", "--out", str(out)]
    refused = CliRunner().invoke(app, command)
    assert "give --kv-tokens, or --gpu and --model" in str(refused.exception)
    assert not out.exists()
    assert CliRunner().invoke(app, [*command, "--kv-tokens", "4096"]).exit_code == 0
    assert load_hardware(out).cost.base_s == pytest.approx(COST.base_s, rel=0.01)


def measured(file: str) -> Path:
    """A measured run's log. Skips the test if the folder of shared data is not there."""
    path = MEASURED / file
    if not path.exists():
        pytest.skip(f"calib/{file} is not in the folder that FORETOKEN_SHARED_DATA names")
    return path


@pytest.mark.parametrize(
    ("file", "profile"),
    [
        ("vllm_RTX4090_Llama-3.1-8B.csv.gz", "rtx4090-llama3.1-8b"),
        ("vllm_RTXPRO6000_Llama-3.1-8B.csv.gz", "rtxpro6000-llama3.1-8b"),
    ],
)
def test_measured_profiles_equal_their_calibration(file, profile):
    gpu, model = profile.split("-", 1)
    bounds = derive_bounds(Roofline(gpu=gpu, model=model, dtype="bfloat16"))
    found = calibrate(read_timings(measured(file)), bounds).cost
    shipped = load_hardware(profile).cost
    assert found.base_s == pytest.approx(shipped.base_s, rel=1e-4)
    assert found.prefill_token_s == pytest.approx(shipped.prefill_token_s, rel=1e-3)
    assert found.decode_seq_s == pytest.approx(shipped.decode_seq_s, rel=1e-2)
    assert found.context_token_s == pytest.approx(shipped.context_token_s, rel=1e-3)
    assert (found.error_p50, found.error_p90) == pytest.approx(
        (shipped.error_p50, shipped.error_p90), abs=1e-3
    )


@pytest.mark.parametrize(
    ("file", "profile", "median", "p99"),
    [
        ("vllm_RTX4090_Llama-3.1-8B.csv.gz", "rtx4090-llama3.1-8b", 0.05, 0.15),  # evicts 107
        ("vllm_RTXPRO6000_Llama-3.1-8B.csv.gz", "rtxpro6000-llama3.1-8b", 0.01, 0.03),
    ],
)
def test_simulated_runs_match_measured_latencies(file, profile, median, p99):
    """End-to-end latency of each request, from arrival at the engine."""
    path, hardware = measured(file), load_hardware(profile)
    log = read_timings(path)
    assert isinstance(log, RequestLog)
    with gzip.open(path, "rt") as lines:
        arrival_s = np.array([float(row["queued_s"]) for row in csv.DictReader(lines)])
    order = np.argsort(arrival_s, kind="stable")
    replayed, _ = serve(
        hardware.cost,
        arrival_s[order],
        log.input_tokens[order].astype(int),
        log.output_tokens[order].astype(int),
        max_running=hardware.max_running,
        budget=hardware.max_batch_tokens,
        kv_tokens=hardware.kv_tokens,
    )
    expected_s = (log.last_token_s - arrival_s)[order]
    error = np.abs(replayed.last_token_s - arrival_s[order] - expected_s) / expected_s
    assert np.quantile(error, 0.5) < median
    assert np.quantile(error, 0.99) < p99
