"""Learning to Rank's tables at a small size."""

from typing import Any

import pytest

from simulator.papers.ltr.tables import BURST, LTR, RATE, SAMPLES, Trial, compute_row, read_plan

Figures = dict[str, Any]
PLAN = read_plan()
NAMES = [f"{each.name} {each.parameter}".rstrip() for each in PLAN.schedulers]


def run(name: str, trial: Trial, count: int) -> Figures:
    return compute_row(PLAN, trial, PLAN.schedulers[NAMES.index(name)], None, count, 0)


def test_plan_has_every_case_and_the_printed_figures():
    names = [case.name for case in LTR.cases(10, 0)]
    assert len(names) == len(set(names)) == 2 * (1 + len(PLAN.rates) + 1) * len(NAMES)
    assert PLAN.paper[BURST]["lmsys"]["ranking"]["latency_mean_s"] == 0.38
    assert PLAN.paper[SAMPLES]["sharegpt"]["fcfs"]["samples_s"] == 343.29


def test_latency_of_a_burst_keeps_the_order_of_the_paper():
    burst = Trial(BURST, "lmsys")
    rows = {name: run(name, burst, 600) for name in ("fcfs", "ranking")}
    assert rows["ranking"]["latency_mean_s"] < rows["fcfs"]["latency_mean_s"]
    assert all(row["finished"] == row["requests"] == 600 for row in rows.values())
    assert rows["ranking"]["tau"] == pytest.approx(0.62, abs=0.06)
    compared: Figures = LTR.complete(list(rows.values()))[1]
    assert compared["paper_fcfs_ratio"] == pytest.approx(1.73 / 0.38, abs=1e-3)
    assert compared["fcfs_ratio"] > 1


def test_classification_that_rarely_ranks_is_like_fcfs_at_a_rate():
    rate = Trial(RATE, "lmsys", 64.0)
    fcfs, classified = (run(name, rate, 150) for name in ("fcfs", "classification"))
    assert classified["latency_mean_s"] == pytest.approx(fcfs["latency_mean_s"], rel=0.1)
    assert 0 < classified["tau"] < 0.35


def test_run_for_samples_ends_with_the_last_of_them():
    row = run("oracle", Trial(SAMPLES, "lmsys"), 80)
    assert row["requests"] == 400
    assert 40 <= row["finished"] < 60  # a step may end several
    assert 0 < row["samples_s"] < 10
