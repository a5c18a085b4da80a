"""ALISE's figures at a small size."""

from typing import Any

import pytest

from simulator.papers.alise.tables import TABLES, compute_row, read_plan, sustained_rate

Figures = dict[str, Any]
PLAN = read_plan()
NAMES = [scheduler.name for scheduler in PLAN.schedulers]


def run(name: str, dataset: str, rate: float, count: int) -> Figures:
    return compute_row(PLAN, dataset, rate, PLAN.schedulers[NAMES.index(name)], None, count, 0)


def test_sustained_rate_is_interpolated_in_the_logarithm():
    # 0.2 is halfway from 0.1 to 0.4 by its logarithm.
    assert sustained_rate([(1.0, 0.05), (2.0, 0.1), (4.0, 0.4)], 0.2) == 3.0
    assert sustained_rate([(1.0, 0.3), (2.0, 0.4)], 0.2) is None
    assert sustained_rate([(1.0, 0.1), (2.0, 0.15)], 0.2) == 2.0


def test_plan_has_every_case_of_the_figures():
    names = [case.name for case in TABLES.cases(10, 0)]
    assert (
        len(names)
        == len(set(names))
        == len(NAMES) * sum(len(traffic.rates) for traffic in PLAN.datasets.values())
    )


@pytest.mark.slow
def test_alise_is_between_vllm_and_the_oracle_under_overload():
    rate = PLAN.datasets["sharegpt"].rates[-1]
    rows = [run(name, "sharegpt", rate, 150) for name in ("alise", "vllm", "oracle")]
    alise, vllm, oracle = rows
    assert alise["latency_mean_s"] < 0.7 * vllm["latency_mean_s"]
    assert oracle["latency_mean_s"] < 1.1 * alise["latency_mean_s"]
    assert all(row["finished"] == 150 for row in rows)
    compared = TABLES.complete(rows)[1]
    expected = vllm["latency_mean_s"] / alise["latency_mean_s"]
    assert compared["latency_ratio"] == pytest.approx(expected, abs=1e-3)
