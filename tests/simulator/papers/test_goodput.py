"""Goodput by clients at a small size."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from simulator.papers.past_future.goodput import GOODPUT, compute_row, held_requests, read_plan
from simulator.workload.workload import Workload

Figures = dict[str, Any]
PLAN = replace(read_plan(), requests_per_client=3)


def run(scheduler: int, load: float) -> Figures:
    return compute_row(PLAN, PLAN.models[0], "D1", PLAN.schedulers[scheduler], load, 1, 0)


def test_held_requests_weight_each_request_by_its_time():
    # 10 + 20/2 = 20 tokens for 20 steps and 30 + 60/2 = 60 for 60 steps: 50 on average.
    two = Workload("two", np.zeros(2), np.array([10, 30]), np.array([20, 60]))
    assert held_requests(two, 1_000) == pytest.approx(20.0)


def test_plan_has_every_case_of_the_figure():
    names = [case.name for case in GOODPUT.cases(10, 0)]
    assert len(names) == len(set(names)) == 3 * (4 + 4 + 2) * 5
    assert "7B D1 load=0.6 past-future reserved=5%" in names


@pytest.mark.slow
def test_goodput_keeps_the_order_of_the_paper_under_overload():
    past_future, aggressive, conservative = (run(place, 1.25) for place in (0, 1, 3))
    assert past_future["stall_free_tokens_per_s"] > aggressive["stall_free_tokens_per_s"]
    assert past_future["output_tokens_per_s"] > conservative["output_tokens_per_s"]
    assert aggressive["evicted_pct"] > 3 * past_future["evicted_pct"]
    assert conservative["evicted_pct"] == 0
    rows = GOODPUT.complete([past_future, aggressive])
    expected = past_future["stall_free_tokens_per_s"] / aggressive["stall_free_tokens_per_s"]
    assert rows[0]["past_future_stall_free_ratio"] == 1.0
    assert rows[1]["past_future_stall_free_ratio"] == pytest.approx(expected, abs=1e-3)
