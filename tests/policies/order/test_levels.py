"""Priority precedes every order and changes nothing if all priorities are equal."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.core import Request
from services.forecast import Ints, certain
from services.policies.decide import decide
from services.policies.decision import Decision
from services.policies.memory import PolicyMemory
from services.policies.order.priority import rank_by_priority, split_by_priority
from services.policies.order.ranking import Ranking
from services.policies.preset import choose, presets
from services.policies.snapshot import Snapshot
from services.scheduler.core.board import Board
from tests.examples import examples
from tests.policies.made_snapshots import jobs, node, snapshots, table

ALL = sorted(presets())
INF = np.inf


def made(key: list[float], line: list[float], split: int) -> Ranking:
    nothing = np.zeros(len(key))
    keys, lines = np.array(key), np.array(line)
    return Ranking(np.arange(len(key)), split, keys, lines, nothing, nothing, INF, PolicyMemory())


def standing(ranking: Ranking) -> list[int]:
    """Rows in queue order; on equal keys running requests precede waiting ones."""
    runs = np.arange(len(ranking.rows)) >= ranking.split
    return [int(row) for row in ranking.rows[np.lexsort((~runs, ranking.queue_key))]]


TABLE = [
    # keys of all, queue keys of the running (the last two), priorities, expected order
    ("lower priority number goes first", [3, 1, 2, 9], [2, 9], [0, 1, 0, 0], [2, 0, 3, 1]),
    ("waiting request precedes running one", [5, 6, 1, 2], [1, 2], [-1, 0, 0, 0], [0, 2, 3, 1]),
    (
        "request that is never preempted stays first",
        [5, 6, 1, 2],
        [-INF, -INF],
        [-9, 0, 3, 3],
        [2, 3, 0, 1],
    ),
    (
        "infinite keys are ranked",
        [INF, INF, INF, 2],
        [INF, 2],
        [2, 1, 1, 1],
        [3, 2, 1, 0],
    ),
]


@pytest.mark.parametrize(("key", "runs", "priority", "line"), [t[1:] for t in TABLE],
                         ids=[t[0] for t in TABLE])  # fmt: skip
def test_priority_precedes_order(
    key: list[float], runs: list[float], priority: list[int], line: list[int]
):
    ranking = made(key, [*key[:2], *runs], 2)
    assert standing(rank_by_priority(ranking, np.array(priority))) == line


def test_equal_priorities_leave_ranking_unchanged():
    ranking = made([3, 1], [3, 1], 2)
    assert rank_by_priority(ranking, np.array([7, 7])) is ranking
    assert rank_by_priority(made([], [], 0), np.zeros(0, np.int64)).rows.tolist() == []


def test_ageing_applies_only_to_first_priority_level():
    ranking = replace(made([3, 1], [3, 1], 2), lift_s=np.array([4.0, 5.0]))
    assert rank_by_priority(ranking, np.array([1, 0])).lift_s.tolist() == [INF, 5.0]


def test_split_by_priority_keeps_order_within_level():
    found = split_by_priority(np.array([4, 1, 3, 0]), np.array([5, -1, 9, -1, 5]))
    assert [each.tolist() for each in found] == [[1, 3], [4, 0]]


def test_board_stores_priority():
    board = Board()
    row = board.add(Request("a", "m", 1, 1, 0.0, priority=-(2**31)))
    assert board.jobs.priority[row] == -(2**31)
    board.remove(row)
    assert board.jobs.priority[board.add(Request("b", "m", 1, 1, 0.0))] == 0


def prioritized(snapshot: Snapshot, priority: Ints) -> Snapshot:
    return replace(snapshot, jobs=replace(snapshot.jobs, priority=priority))


def decided(snapshot: Snapshot, preset: str, seed: int) -> Decision:
    return decide(snapshot, choose(preset), PolicyMemory(), np.random.default_rng(seed), 7)


@pytest.mark.parametrize("preset", ALL)
@settings(max_examples=examples(25))
@given(snapshots(), st.integers(-(2**31), 2**31 - 1), st.integers(0, 99))
def test_equal_priorities_leave_decision_unchanged(
    preset: str, snapshot: Snapshot, level: int, seed: int
) -> None:
    same = prioritized(snapshot, np.full(len(snapshot.jobs), level))
    assert pickle.dumps(decided(same, preset, seed)) == pickle.dumps(
        decided(snapshot, preset, seed)
    )


@pytest.mark.parametrize("preset", ALL)
@settings(max_examples=examples(40))
@given(st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.integers(0, 30)), min_size=1,
                max_size=16), st.integers(1, 6), st.integers(0, 99))  # fmt: skip
def test_admission_follows_priority(
    preset: str, rows: list[tuple[int, bool, int]], places: int, seed: int
) -> None:
    """There is memory for all, so a waiting request fits once a slot is free."""
    count = len(rows)
    priority, runs, waited_s = (np.array(column) for column in zip(*rows, strict=True))
    runs &= np.cumsum(runs) <= places
    forecasts = table(certain(50))
    board = jobs(
        count,
        priority=priority,
        home=np.where(runs, 1, -1),
        held=np.where(runs, 10, 0),
        limit=np.where(runs, 100, 0),
        arrival_s=100.0 - waited_s,
        since_s=100.0 - waited_s,
        admitted=np.arange(count),
    )
    workers = (node(1, 100_000, places),)
    queued, running = np.flatnonzero(~runs), np.flatnonzero(runs)
    snapshot = Snapshot(100.0, board, queued, running, workers, forecasts)
    run = set(decided(snapshot, preset, seed).workers[0].run.tolist())
    enter = [int(priority[row]) for row in queued if row in run]
    wait = [int(priority[row]) for row in queued if row not in run]
    assert not (enter and wait) or max(enter) <= min(wait)
