"""Summaries: figures worked out by hand from a transcript, and rows of JSON."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from services.core import Sla
from simulator.engine.simulation import simulate
from simulator.hardware.hardware import Hardware
from simulator.report.plots import plot_distributions, plot_sweep
from simulator.report.sla import parse_sla
from simulator.report.summary import summarize, summary_row
from simulator.study import Point, run_points, vary
from tests.simulator.fixtures import BY_HAND, INSTANT, random_workload, settings, workload

HAND = Hardware("hand", BY_HAND, kv_tokens=1_600, max_batch_tokens=64)


def test_summary_of_two_requests_matches_worked_example():
    """First tokens at 2 and 5 s (arrivals 0 and 0.5), both end at 6 s: 3 and 2 tokens."""
    made = replace(settings("fcfs", HAND, timing=INSTANT), sla=Sla("test", ttft_s=3.0))
    summary = summarize(simulate(made, workload([(0.0, 10, 3), (0.5, 20, 2)])))
    assert summary.makespan_s == 6.0
    assert summary.output_tokens_per_s == pytest.approx(5 / 6)
    assert summary.ttft_mean_s == pytest.approx((2.0 + 4.5) / 2)
    assert summary.e2e_mean_s == pytest.approx((6.0 + 5.5) / 2)
    assert summary.tpot_mean_s == pytest.approx((2.0 + 1.0) / 2)
    assert summary.token_latency_mean_s == pytest.approx((6.0 / 3 + 5.5 / 2) / 2)
    assert summary.waiting_mean_s == pytest.approx((3.0 + 4.5) / 2)  # A's gap, B's TTFT
    assert summary.goodput == 0.5
    assert summary.goodput_tokens_per_s == pytest.approx(3 / 6)
    assert summary.busy_share == pytest.approx(1.0)
    # Decode rows: none for 2 s, one for 3 s beside the prefill of B, two for 1 s.
    assert summary.rows == pytest.approx((1 * 3 + 2 * 1) / 6)


def test_row_of_a_run_without_finished_requests_is_valid_json():
    made = settings("fcfs", HAND, max_tokens=64)
    row = summary_row(summarize(simulate(made, workload([(0.0, 9_000, 1)]))), {"rate": 2.0})
    assert row["rate"] == 2.0
    assert row["rejected"] == 1
    assert row["ttft_p99_s"] is None
    json.dumps(row, allow_nan=False)


@pytest.mark.parametrize(
    ("text", "sla"),
    [
        ("", Sla("none")),
        ("ttft=1s", Sla("given", 1.0)),
        ("past-future", Sla("past-future", 10.0, mtpot_s=1.5)),
        ("ttft=2,tpot=50ms,mtpot=0.5min", Sla("given", 2.0, 0.05, 30.0)),
    ],
)
def test_parse_sla_reads_classes_and_budgets(text: str, sla: Sla):
    assert parse_sla(text) == sla


@pytest.mark.parametrize("text", ["tftt=1s", "ttft", "ttft=fast", "ttft=-1s", "ttft=0"])
def test_parse_sla_refuses_invalid_text(text: str):
    with pytest.raises(ValueError, match="sla: "):
        parse_sla(text)


def study() -> list[Point]:
    requests = random_workload(2, 20, 20.0)
    return [Point({}, settings(preset), requests) for preset in ("fcfs", "srtf")]


def test_study_in_several_processes_equals_one_process():
    points = vary(study(), "rate", [5.0, 50.0])
    one, several = run_points(points, 1), run_points(points, 2)
    assert [f.summary for f in one] == [f.summary for f in several]
    assert [f.keys for f in one] == [{"rate": 5.0}] * 2 + [{"rate": 50.0}] * 2


@pytest.mark.parametrize(
    ("key", "value"),
    [("clients", 3), ("workers", 2), ("kv_tokens", 640), ("max_tokens", 8), ("rate", 9)],
)
def test_sweep_key_changes_its_setting(key: str, value: float):
    [point, _] = vary(study(), key, [value])
    found = {
        "clients": point.workload.clients,
        "workers": len(point.settings.hardware),
        "kv_tokens": point.settings.hardware[0].kv_tokens,
        "max_tokens": point.settings.max_tokens,
        "rate": pytest.approx(point.workload.rate),
    }
    assert found[key] == value
    assert point.keys == {key: value}


def test_sweep_changes_a_number_of_the_preset():
    [_, srtf] = vary([Point({}, settings("srtf"), study()[0].workload)] * 2, "preset.ageing_s", [7])
    assert srtf.settings.preset.params["ageing_s"] == 7
    assert srtf.settings.preset.name == "srtf"


def test_unknown_sweep_keys_are_refused():
    with pytest.raises(ValueError, match="unknown sweep key 'rates', did you mean rate"):
        vary(study(), "rates", [1.0])
    with pytest.raises(ValueError, match="unknown preset key 'ageing'"):
        vary(study(), "preset.ageing", [1.0])
    with pytest.raises(ValueError, match="rate must be positive"):
        vary(study(), "rate", [0.0])


def test_summary_plots_are_written(tmp_path: Path):
    findings = run_points(vary(study(), "rate", [5.0, 50.0]), 1)
    rows = [(finding.keys, finding.summary) for finding in findings]
    plot_sweep(tmp_path / "rate.png", "rate", rows)
    plot_distributions(tmp_path / "latency.png", {"fcfs": findings[0].records})
    for name in ("rate.png", "latency.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="cannot write"):
        plot_sweep(tmp_path / "none" / "rate.png", "rate", rows)
