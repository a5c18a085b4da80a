"""Earliest deadline and least slack: worked examples and reference implementations."""

from dataclasses import replace
from math import inf, isfinite, isinf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.costs import CostModel
from services.forecast import certain
from services.policies.memory import PolicyMemory
from services.policies.order.ranking import CLASS
from services.policies.order.registry import ORDERS
from services.policies.snapshot import Snapshot
from tests.policies.made_snapshots import jobs, node, snapshots, table
from tests.policies.order.test_all import with_budgets

EDF, SLACK = ORDERS["edf"].rank, ORDERS["slack"].rank
PARAMS = {"hysteresis_s": 0.5}
STEP = CostModel(1.0, 0.125, 0.0, 0.0)  # a step takes a second, and so does a prompt of 8 tokens


def board(now: float, running: int = 0, **columns: list[float]) -> Snapshot:
    """All prompts have 8 tokens and all outputs 10; waiting requests have no KV."""
    count = len(next(iter(columns.values())))
    split = count - running
    plain: dict[str, list[float]] = {
        "prompt": [8.0] * count,
        "total": [10.0] * count,
        "held": [0.0] * split + [8.0] * running,
    }
    of = jobs(count, **(plain | columns))
    worker = replace(node(), cost=STEP)
    return Snapshot(
        now, of, np.arange(split), np.arange(split, count), (worker,), table(certain(10))
    )


def test_edf_ranks_by_deadline_of_next_token() -> None:
    """The time is 20 s. Deadlines: 25 for the first token; 10 + 3 · 4 = 22 for the fourth; 21 for
    the end; 15, already missed. Two requests have no deadline, and the second of them arrived
    first."""
    found = EDF(
        board(
            20.0,
            arrival_s=[5.0, 5.0, 5.0, 5.0, 9.0, 8.0],
            ttft_s=[20.0, 5.0, inf, 10.0, inf, inf],
            first_s=[inf, 10.0, inf, inf, inf, inf],
            output=[0, 3, 0, 0, 0, 0],
            tpot_s=[9.0, 4.0, inf, inf, inf, inf],
            deadline_s=[30.0, inf, 21.0, inf, inf, inf],
        ),
        PARAMS,
        PolicyMemory(),
    )
    assert found.key[:4].tolist() == [5, 2, 1, -5]
    assert np.argsort(found.key).tolist() == [3, 2, 1, 0, 5, 4]
    assert found.key[4:].tolist() == [2 * CLASS - 11, 2 * CLASS - 12]


def test_slack_ranks_least_slack_first_and_lost_requests_last() -> None:
    """The time is 20 s; a first token takes 2 s and a whole output 11 s. First tokens due at 25 and
    23 leave 3 and 1 s of slack, and one due at 21 is lost. An end due at 32.5 leaves 1.5 s. A
    request without deadline arrived before the lost one."""
    found = SLACK(
        board(
            20.0,
            arrival_s=[5.0, 13.0, 11.0, 6.0, 7.0],
            ttft_s=[20.0, 10.0, 10.0, inf, inf],
            deadline_s=[inf, inf, inf, 32.5, inf],
        ),
        PARAMS,
        PolicyMemory(),
    )
    assert found.key[[0, 1, 3]].tolist() == [3, 1, 1.5]
    assert np.argsort(found.key).tolist() == [1, 3, 0, 4, 2]
    assert found.next_s == 21  # the time at which the second request is lost


def test_slack_judges_pace_at_last_token() -> None:
    """The first token was in time at 10 s, so the tenth is due 9 · 2 = 18 s later, at 28. At 20 s,
    4 tokens leave 6 s of work and 2 s of slack; 7 tokens leave 3 s of work and 5 s of slack. A
    request with a late first token has no deadline left."""
    columns: dict[str, list[float]] = {
        "arrival_s": [5.0] * 3,
        "ttft_s": [6.0, 6.0, 4.0],
        "first_s": [10.0] * 3,
        "tpot_s": [2.0] * 3,
        "output": [4, 7, 7],
        "held": [12, 15, 15],
    }
    found = SLACK(board(20.0, running=3, **columns), PARAMS, PolicyMemory())
    assert found.key.tolist() == pytest.approx([2, 5, 2 * CLASS - 15])
    assert found.queue_key.tolist() == pytest.approx([1.5, 4.5, CLASS])


def test_slack_assumes_earlier_first_token_was_in_time() -> None:
    """4 tokens were delivered before this scheduler started. The first counts as delivered when
    due, at 11 s, so the tenth is due at 29. Recomputing 12 tokens of context takes 1.5 s, the
    rest 6 s."""
    found = SLACK(
        board(20.0, arrival_s=[5.0], ttft_s=[6.0], tpot_s=[2.0], output=[4]), PARAMS, PolicyMemory()
    )
    assert found.key.tolist() == pytest.approx([29 - 20 - 7.5])


def test_edf_preempts_only_beyond_hysteresis_and_with_deadline() -> None:
    columns: dict[str, list[float]] = {
        "arrival_s": [0.0, 0.0, 0.0, 0.0, 4.0],
        "deadline_s": [7.75, 7.25, inf, 8.0, inf],
        "output": [0, 0, 0, 4, 4],
    }
    found = EDF(board(5.0, running=2, **columns), PARAMS, PolicyMemory())
    assert found.queue_key.tolist() == [2.75, 2.25, 2 * CLASS - 5, 2.5, CLASS]
    never = EDF(board(5.0, running=2, **columns), {"hysteresis_s": inf}, PolicyMemory())
    assert never.queue_key[3:].tolist() == [-inf, -inf]


def first_of(snapshot: Snapshot, row: int) -> tuple[float, float]:
    of = snapshot.jobs
    due_s = float(of.arrival_s[row] + of.ttft_s[row])
    first_s = float(of.first_s[row])
    if isinf(first_s) and of.output[row] > 0:
        first_s = due_s if isfinite(due_s) else float(of.arrival_s[row])
    return first_s, due_s


def literal_edf(snapshot: Snapshot, row: int) -> float:
    of = snapshot.jobs
    first_s, due_s = first_of(snapshot, row)
    if isfinite(first_s):
        due_s = first_s + max(1, int(of.output[row])) * float(of.tpot_s[row])
    return min(due_s, float(of.deadline_s[row])) - snapshot.now


def literal_slack(snapshot: Snapshot, row: int) -> float:
    """The requests running on a worker share each second of a step."""
    of, now = snapshot.jobs, snapshot.now
    missing = max(0, int(of.prompt[row] + of.output[row] - of.held[row]))
    total = float(of.total[row])
    starts_s = now + 0.125 * missing + 1.0
    ends_s = now + 0.125 * missing + max(1.0, total - int(of.output[row]))
    first_s, due_s = first_of(snapshot, row)
    whole_s = float(of.deadline_s[row]) - ends_s
    if isinf(first_s):
        return min(due_s - starts_s, whole_s)
    if first_s > due_s:
        return -inf
    return min(first_s + max(1.0, total - 1) * float(of.tpot_s[row]) - ends_s, whole_s)


@settings(max_examples=200)
@given(snapshots(), st.integers(0, 2**32))
def test_edf_and_slack_match_reference_implementation(snapshot: Snapshot, seed: int) -> None:
    snapshot = with_budgets(snapshot, seed)
    workers = tuple(replace(worker, cost=STEP) for worker in snapshot.workers)
    snapshot = replace(snapshot, workers=workers)
    for rank, literal, counts in (
        (EDF, literal_edf, isfinite),
        (SLACK, literal_slack, lambda spare_s: isfinite(spare_s) and spare_s > 0),
    ):
        found = rank(snapshot, PARAMS, PolicyMemory())
        rows = found.rows.tolist()
        expected = []
        for row in rows:
            due_s = literal(snapshot, row)
            age_s = snapshot.now - float(snapshot.jobs.arrival_s[row])
            expected.append(due_s if counts(due_s) else 2 * CLASS - age_s)
        assert found.key.tolist() == pytest.approx(expected)
