"""Summaries: figures worked out by hand from a transcript, and rows of JSON."""

import json
from dataclasses import replace
from math import inf, nan

import pytest

from services.core import Sla
from simulator.engine.simulation import simulate
from simulator.hardware.hardware import Hardware
from simulator.report.sla import SlaTarget, parse_sla, parse_target
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


@pytest.mark.parametrize(
    "text",
    ["tftt=1s", "ttft", "ttft=fast", "ttft=-1s", "ttft=0", "ttft=nan", "ttft=inf", "ttft=1,ttft=2"],
)
def test_parse_sla_refuses_invalid_text(text: str):
    with pytest.raises(ValueError, match="sla: "):
        parse_sla(text)


def test_parse_sla_refuses_a_percentage():
    with pytest.raises(ValueError, match="sla: p=99 belongs to `foretoken plan`"):
        parse_sla("ttft=1s,p=99")


def test_parse_target_reads_budgets_and_percentage():
    assert parse_target("ttft=1s, p=99.5") == SlaTarget(Sla("given", 1.0), 0.995)
    past_future = Sla("past-future", 10.0, mtpot_s=1.5)
    assert parse_target("past-future,p=90") == SlaTarget(past_future, 0.9)
    assert parse_target("p=100,tpot=50ms") == SlaTarget(Sla("given", tpot_s=0.05), 1.0)
    assert parse_target("ttft=1s").share == 0.99


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "give a budget"),
        ("p=99", "give a budget"),
        ("ttft=1s,p=0.99", "'p=0.99' is not a percentage above 1"),
        ("ttft=1s,p=101", "'p=101' is not a percentage"),
        ("ttft=1s,p=nan", "'p=nan' is not a percentage"),
        ("ttft=1s,p=most", "'p=most' is not a percentage"),
        ("ttft=1s,p", "'p=' is not a percentage"),
        ("p=99,p=98,ttft=1s", "p is given twice"),
        ("latency=1s,p=99", "unknown budget 'latency'"),
    ],
)
def test_parse_target_refuses_invalid_text(text: str, sentence: str):
    with pytest.raises(ValueError, match=f"sla: .*{sentence}"):
        parse_target(text)


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


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("rate", 0.0, "rate must be a positive number, got 0"),
        ("rate", nan, "rate must be a positive number, got nan"),
        ("rate", inf, "rate must be a positive number, got inf"),
        ("workers", -1.0, "workers must be a positive number, got -1"),
        ("workers", 1.5, "workers must be a whole number, got 1.5"),
        ("clients", 0.5, "clients must be a whole number, got 0.5"),
        ("kv_tokens", 15.0, "kv_tokens must be at least a block of 16 tokens, got 15"),
        ("preset.watermark", nan, r"preset.watermark must lie in \[.*\], got nan"),
    ],
)
def test_sweep_values_out_of_range_are_refused(key: str, value: float, sentence: str):
    with pytest.raises(ValueError, match=sentence):
        vary(study()[:1], key, [value])


def test_rate_of_a_closed_loop_is_not_swept():
    requests = workload([(0.0, 10, 3)], clients=1)
    with pytest.raises(ValueError, match="clients are a closed loop, which has no rate"):
        vary([Point({}, settings("fcfs"), requests)], "rate", [1.0])
