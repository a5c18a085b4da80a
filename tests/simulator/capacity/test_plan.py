"""Plans: queues worked out by hand, and verdicts that independent simulations confirm."""

import json
import sys
from dataclasses import replace
from math import inf
from pathlib import Path

import numpy as np
import pytest

from foretoken.__main__ import main
from services.core import Sla
from simulator.capacity.plan import (
    Candidate,
    EnoughWorkers,
    MissedAlone,
    Plan,
    TooFewWorkers,
    judge,
    plan,
)
from simulator.capacity.report import explain, plan_row, plan_table, usd_per_million
from simulator.capacity.search import TOLERANCE
from simulator.engine.simulation import simulate
from simulator.hardware.hardware import Hardware
from simulator.study import Point
from simulator.workload.workload import MAX_RATE, MIN_RATE, Workload
from tests.simulator.fixtures import BY_HAND, INSTANT, SMALL, random_workload, settings, workload

# One request at a time: 10 prompt tokens and one output token take 2 s.
ONE_SLOT = Hardware("hand", BY_HAND, kv_tokens=1_600, max_running=1, usd_per_hour=3.6)
SERVICE_S = 2.0


def queue(interval_s: float, requests: int = 21) -> Workload:
    return workload([(number * interval_s, 10, 1) for number in range(requests)])


def candidate(
    requests: Workload, sla: Sla, share: float = 1.0, most: int = 16, hardware: Hardware = ONE_SLOT
) -> Candidate:
    made = settings("fcfs", hardware, timing=INSTANT)
    return Candidate(Point({}, replace(made, sla=sla), requests), share, most)


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_plan_of_even_arrivals_needs_service_time_over_interval(workers: int):
    """Each request takes 2 s: with one every 2 / n seconds, n workers serve each at once, and with
    one less a queue grows by 2 / n seconds a request."""
    found = judge(candidate(queue(SERVICE_S / workers), Sla("test", ttft_s=SERVICE_S + 1e-6)))
    assert isinstance(found, EnoughWorkers)
    assert found.workers == workers
    assert found.summary.goodput == 1.0
    assert found.summary.ttft_mean_s == pytest.approx(SERVICE_S)


def test_plan_finds_the_rate_at_which_the_last_request_waits_too_long():
    """One worker, 21 requests every d seconds: the last one waits 20 · (2 − d) seconds. It may wait
    0.5 s, so that d is at least 1.975 s."""
    found = judge(candidate(queue(1.0), Sla("test", ttft_s=SERVICE_S + 0.5)))
    assert isinstance(found, EnoughWorkers)
    assert found.workers == 2
    assert found.rate_of_one and found.rate
    assert found.rate_of_one.kept <= 1 / 1.975 < found.rate_of_one.missed
    assert found.rate_of_one.missed <= found.rate_of_one.kept * (1 + TOLERANCE)
    # Two workers in turn: the 21st request is the 11th of its worker, which has one every 2d.
    assert found.rate.kept <= 2 / (SERVICE_S - 0.5 / 10) < found.rate.missed


@pytest.mark.parametrize("interval_s", [1e-12, 1e8])
def test_plan_tries_only_rates_that_a_run_can_have(interval_s: float):
    """One worker keeps the SLA at every rate, and the rate of the workload is out of bounds."""
    found = judge(candidate(queue(interval_s, 2), Sla("test", ttft_s=10 * SERVICE_S)))
    assert isinstance(found, EnoughWorkers)
    assert found.rate_of_one
    assert MIN_RATE <= found.rate_of_one.kept <= MAX_RATE


def test_plan_of_a_burst_has_workers_and_no_rate():
    """Six requests at once, of which each may wait for one other: three workers."""
    found = judge(candidate(queue(0.0, 6), Sla("test", ttft_s=2 * SERVICE_S + 1e-6)))
    assert isinstance(found, EnoughWorkers)
    assert (found.workers, found.rate, found.rate_of_one) == (3, None, None)


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["fcfs", "foretoken"])
def test_planned_workers_keep_the_sla_and_one_less_does_not(preset: str):
    sla, share = Sla("test", ttft_s=0.5, tpot_s=0.02), 0.95
    requests = random_workload(4, 30, 60.0)
    made = replace(settings(preset), sla=sla)
    found = judge(Candidate(Point({}, made, requests), share, 32))
    assert isinstance(found, EnoughWorkers)
    assert 1 < found.workers < 32

    def share_met(workers: int, traffic: Workload) -> float:
        run = simulate(replace(made, hardware=(SMALL,) * workers), traffic)
        return float(np.mean(run.records.meets(sla)))

    assert share_met(found.workers, requests) == found.summary.goodput >= share
    assert share_met(found.workers - 1, requests) < share
    assert found.rate and found.rate_of_one
    for workers, limit in ((found.workers, found.rate), (1, found.rate_of_one)):
        assert share_met(workers, requests.at_rate(limit.kept)) >= share
        if limit.missed < inf:  # else no rate that was tried misses the SLA
            assert share_met(workers, requests.at_rate(limit.missed)) < share
    assert found.rate_of_one.missed < inf


# No number of workers


def test_sla_below_the_service_time_is_missed_alone():
    assert judge(candidate(queue(1.0), Sla("test", ttft_s=1.9))) == MissedAlone(1.0)


def test_share_of_requests_that_miss_alone_decides():
    """Every tenth prompt has 40 tokens and takes 5 s."""
    rows = [(3.0 * number, 40 if number % 10 == 0 else 10, 1) for number in range(40)]
    sla = Sla("test", ttft_s=4.0)
    assert judge(candidate(workload(rows), sla, share=0.95)) == MissedAlone(0.1)
    assert isinstance(judge(candidate(workload(rows), sla, share=0.9)), EnoughWorkers)


def test_refused_requests_miss_the_sla():
    rows = [(4.0 * number, 9_000 if number == 3 else 10, 1) for number in range(10)]
    sla = Sla("test", ttft_s=4.0)
    assert judge(candidate(workload(rows), sla)) == MissedAlone(0.1)
    found = judge(candidate(workload(rows), sla, share=0.9))
    assert isinstance(found, EnoughWorkers)
    assert found.summary.rejected == 1


def test_bound_that_is_too_small_is_told_from_an_sla_that_cannot_be_kept():
    """Five workers are needed. Of three, a third of a second is lost per request."""
    short = candidate(queue(SERVICE_S / 5), Sla("test", ttft_s=SERVICE_S + 1e-6), most=3)
    found = judge(short)
    assert isinstance(found, TooFewWorkers)
    assert found.workers == 3
    assert found.share == pytest.approx(3 / 21)
    assert found.rate_of_one and found.rate_of_one.kept <= 0.5 < found.rate_of_one.missed
    assert "with 3 workers, the most that may be tried" in explain(Plan(short, found))
    assert plan_row(Plan(short, found))["tried_workers"] == 3


def test_short_workload_has_no_limit_of_its_rate():
    """Two requests and two slots: no rate misses the SLA."""
    hardware = replace(ONE_SLOT, max_running=2)
    made = candidate(queue(4.0, 2), Sla("test", ttft_s=5.0), hardware=hardware)
    found = judge(made)
    assert isinstance(found, EnoughWorkers)
    assert found.rate and found.rate.missed == inf
    assert found.rate.kept == pytest.approx(1.0)  # two requests in the 2 s of one
    assert "too short to find the largest rate" in explain(Plan(made, found))


# Reports


def test_cost_of_a_million_tokens_matches_arithmetic():
    """7.2 USD an hour are 0.002 USD a second; 50 tokens a second are 0.00004 USD a token."""
    assert usd_per_million(7.2, 50.0) == pytest.approx(40.0)
    assert usd_per_million(0.0, 50.0) is None
    assert usd_per_million(7.2, 0.0) is None


def test_row_of_a_plan_has_its_cost_and_memory():
    """Two workers at 3.6 USD/h. 21 tokens in 22 s: arrivals until 20 s, then 2 s of service. A
    request of 11 tokens holds a block of 16 while it is served, 21 · 2 s of 2 · 22 s."""
    made = candidate(queue(1.0), Sla("test", ttft_s=SERVICE_S + 1e-6))
    row = plan_row(Plan(made, judge(made)))
    assert row["workers"] == 2
    assert row["usd_per_hour"] == pytest.approx(7.2)
    assert row["usd_per_million_output_tokens"] == pytest.approx(7.2 / 3600 / (21 / 22) * 1e6)
    assert row["kv_peak_share"] == pytest.approx(16 / 1_600)
    assert row["kv_share"] == pytest.approx(16 / 1_600 * 42 / 44)
    json.dumps(row, allow_nan=False)


@pytest.mark.slow
def test_candidates_in_several_processes_equal_one_process():
    candidates = [
        candidate(queue(interval_s), Sla("test", ttft_s=SERVICE_S + 1e-6))
        for interval_s in (2.0, 1.0)
    ]
    ended: list[str] = []
    plans = plan(candidates, 2, lambda name, *_: ended.append(name))
    assert [each.verdict for each in plans] == [judge(each) for each in candidates]
    assert ended == ["hand, fcfs"] * 2
    assert plan_table(plans, "title").row_count == 2


HARDWARE = """
[cost]
base_s = 0.01
prefill_token_s = 1e-4
decode_seq_s = 1e-4
context_token_s = 1e-6
[memory]
kv_tokens = 4096
[price]
usd_per_hour = 2.0
"""


def test_plan_command_writes_its_table_and_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    Path("priced.toml").write_text(HARDWARE)
    rows = [f"{number / 10:.1f},50,{20 + number % 7}" for number in range(60)]
    Path("trace.csv").write_text("\n".join(["arrival_s,input_tokens,output_tokens", *rows]))
    words = "plan --trace trace.csv --sla ttft=500ms,tpot=15ms,p=95 --hardware priced.toml"
    words += " --preset fcfs --predictor history --max-workers 8 --processes 1 --json plan.json"
    monkeypatch.setattr(sys, "argv", ["foretoken", *words.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    [row] = json.loads(Path("plan.json").read_text())["rows"]
    assert row["hardware"] == "priced"
    assert row["verdict"] == "enough_workers"
    assert row["share"] >= 0.95
    cost = row["workers"] * 2.0 / 3_600 / row["output_tokens_per_s"] * 1e6
    assert row["usd_per_million_output_tokens"] == pytest.approx(cost)
    assert "95 % of 60 requests" in shown
    assert f"{cost:.3g}" in shown
