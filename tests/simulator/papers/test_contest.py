"""Contests of the papers' presets: their schedulers, and how rows are compared."""

from collections import Counter

import pytest

from simulator.papers import contest as contests
from simulator.papers.contest import Contest, read_contests
from simulator.papers.reproduction import Row


def row(paper: str, scheduler: str, role: str, measure: str, value: float) -> Row:
    return {
        "paper": paper, "scheduler": scheduler, "role": role, "measure": measure, "value": value,
    }  # fmt: skip


def test_best_baseline_is_marked_and_all_are_compared_with_the_papers_preset():
    rows = [
        row("A", "a", "paper", "requests/s", 4.0),
        row("A", "x", "baseline", "requests/s", 1.0),
        row("A", "y", "baseline", "requests/s", 2.0),
        row("A", "foretoken", "foretoken", "requests/s", 6.0),
        row("B", "b", "paper", "s/token", 0.2),
        row("B", "x", "baseline", "s/token", 0.1),
        row("B", "y", "baseline", "s/token", 0.8),
    ]
    found = contests.ALL.complete(rows)
    assert [each["role"] for each in found] == [
        "paper", "baseline", "best baseline", "foretoken", "paper", "best baseline", "baseline",
    ]  # fmt: skip
    assert [each["paper_ratio"] for each in found] == [1, 0.25, 0.5, 1.5, 1, 2, 0.25]


@pytest.mark.parametrize("contest", read_contests(), ids=lambda contest: contest.paper)
def test_every_contest_has_the_papers_preset_baselines_the_oracle_and_foretoken(contest: Contest):
    roles = Counter(each.role for each in contest.contestants)
    assert roles["paper"] == roles["oracle"] == roles["foretoken"] == 1
    assert roles["tail-aware"] == 1 <= roles["baseline"]
    names = [each.name for each in contest.contestants]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("paper", ["ALISE", "LTR", "SCLS", "Magnus"])
def test_foretoken_runs_on_the_papers_workload(paper: str):
    [contest] = [each for each in read_contests() if each.paper == paper]
    [foretoken] = [each for each in contest.contestants if each.role == "foretoken"]
    made = contests.compute_row(contest, foretoken, None, 20, 0)
    assert made["scheduler"] == "foretoken"
    assert isinstance(made["value"], float) and made["value"] > 0
    assert isinstance(made["p99_s"], float) and isinstance(made["mean_s"], float)
    assert made["p99_s"] >= made["mean_s"]
