"""Learning to Rank's tables at a small size."""

from typing import Any

import numpy as np
import pytest

from simulator.hardware.hardware_file import load_hardware
from simulator.papers.datasets import QUANTILES, Lengths
from simulator.papers.ltr.tables import BURST, LTR, RATE, SAMPLES, Trial, compute_row, read_plan
from simulator.papers.schedulers import Conditions, Scheduler, measure_latency, serve

Figures = dict[str, Any]
PLAN = read_plan()
NAMES = [f"{each.name} {each.parameter}".rstrip() for each in PLAN.schedulers]


def run(name: str, trial: Trial, count: int) -> Figures:
    return compute_row(PLAN, trial, PLAN.schedulers[NAMES.index(name)], None, count, 0)


def test_plan_has_every_case_and_the_printed_figures():
    names = [case.name for case in LTR.cases(10, 0)]
    assert len(names) == len(set(names)) == 2 * (1 + len(PLAN.rates) + 1) * len(NAMES)
    assert PLAN.paper[BURST]["lmsys"]["ranking"]["latency_mean_s"] == 0.38
    assert PLAN.paper[BURST]["sharegpt"]["perception"]["latency_p90_s"] == 1.67
    assert PLAN.paper[SAMPLES]["sharegpt"]["fcfs"]["samples_s"] == 343.29


@pytest.mark.slow
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


@pytest.mark.parametrize(
    ("dataset", "tau", "paper_s"), [("lmsys", 0.67, 0.75), ("sharegpt", 0.51, 1.35)]
)
def test_perception_has_the_papers_tau_and_a_latency_above_that_of_fcfs(
    dataset: str, tau: float, paper_s: float
) -> None:
    """All of a small burst run at once, so that the guess is time lost."""
    burst = Trial(BURST, dataset)
    fcfs, perception = (run(name, burst, 300) for name in ("fcfs", "perception may starve"))
    assert perception["tau"] == pytest.approx(tau, abs=0.06)
    assert perception["finished"] == 300
    assert perception["latency_mean_s"] > fcfs["latency_mean_s"]
    assert perception["paper_latency_mean_s"] == paper_s


def test_latency_of_perception_is_per_token_of_the_answer_alone():
    """A request alone: a guess of 15 tokens and an answer of 10 take as long as an answer of 25."""
    hardware, qualities = load_hardware(PLAN.hardware), {"perception": {"tau": 0.5}}

    def served(scheduler: Scheduler, output_tokens: int) -> tuple[int, Figures]:
        lengths = Lengths(np.array([30]), np.array([output_tokens]), QUANTILES)
        conditions = Conditions(hardware, output_tokens, 0.0, qualities, 0)
        result = serve(scheduler, conditions, lengths, np.zeros(1))
        return int(result.records.tokens[0]), measure_latency(result)

    perception = PLAN.schedulers[NAMES.index("perception may starve")]
    tokens, guessed = served(perception, 10)
    plain_tokens, plain = served(Scheduler("oracle", "ltr-oracle"), 25)
    assert (tokens, plain_tokens) == (10, 25)
    assert guessed["latency_mean_s"] == pytest.approx(plain["latency_mean_s"] * 25 / 10, abs=2e-4)


def test_run_for_samples_ends_with_the_last_of_them():
    row = run("oracle", Trial(SAMPLES, "lmsys"), 80)
    assert row["requests"] == 400
    assert 40 <= row["finished"] < 60  # a step may end several
    assert 0 < row["samples_s"] < 10
