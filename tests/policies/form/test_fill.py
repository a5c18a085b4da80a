"""Filling a worker from its queue: worked examples and reference implementations."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from services.policies.decision import WaitReason
from services.policies.form.fill import FillResult, fill_slots
from services.policies.form.past_future import PeakDemand
from services.policies.form.sums import SumDemand
from tests.examples import examples
from tests.policies.form.peak_oracle import peak_tokens
from tests.policies.made_snapshots import fill_queue
from tests.policies.made_snapshots import line as line_of

W, R = False, True  # waits, runs


def filled(
    line: Sequence[tuple[bool, float]], limit: float, slots: int = 99, alone: bool = False
) -> FillResult:
    runs = np.array([runs for runs, _ in line], bool)
    held = np.array([held for _, held in line], float)
    return fill_queue(runs, SumDemand(held, np.array([limit])), slots, alone)


def rows_run(
    line: Sequence[tuple[bool, float]], limit: float, slots: int = 99, alone: bool = False
) -> list[int]:
    found: list[int] = np.flatnonzero(filled(line, limit, slots, alone).runs_next).tolist()
    return found


def test_fill_keeps_most_urgent_running_requests_without_memory_check() -> None:
    assert rows_run([(R, 90), (R, 90), (W, 1)], 100) == [0, 1]


def test_fill_admits_more_urgent_request_in_place_of_least_urgent() -> None:
    assert rows_run([(W, 40), (R, 40), (R, 40)], 100) == [0, 1]
    assert rows_run([(R, 40), (W, 40), (R, 40)], 100) == [0, 1]
    assert rows_run([(W, 40), (R, 70), (R, 20)], 100) == [0, 2]
    assert rows_run([(W, 101), (R, 70), (R, 20)], 100) == [1, 2]


def test_fill_keeps_running_request_behind_one_that_does_not_fit() -> None:
    assert rows_run([(W, 50), (W, 60), (R, 40)], 100) == [0, 2]
    assert rows_run([(W, 60), (R, 50), (R, 45), (R, 40)], 100) == [0, 3]
    assert rows_run([(W, 60), (R, 50), (R, 10), (R, 20), (R, 15)], 100) == [0, 2, 3]


def test_fill_admits_no_request_behind_one_that_does_not_fit() -> None:
    assert rows_run([(W, 50), (W, 60), (W, 1)], 100) == [0]
    assert rows_run([(W, 60), (R, 50), (W, 10)], 100) == [0]


def test_fill_assigns_slots_in_queue_order() -> None:
    line = [(W, 1), (R, 1), (W, 1), (R, 1), (R, 1)]
    assert rows_run(line, 99, slots=3) == [0, 1, 2]
    assert rows_run(line, 99, slots=4) == [0, 1, 2, 3]
    assert rows_run([(R, 1), (R, 1), (W, 1)], 99, slots=1) == [0, 1]


def test_fill_admits_first_request_alone_on_idle_worker() -> None:
    assert rows_run([(W, 101), (W, 1)], 100, alone=True) == [0]
    assert rows_run([(W, 101), (W, 1)], 100) == []
    assert rows_run([(W, 101), (R, 1)], 100, alone=True) == [1]
    assert rows_run([(W, 101)], 100, alone=True, slots=0) == []


def test_fill_gives_each_waiting_request_a_reason() -> None:
    reported = filled([(W, 50), (R, 60), (W, 10), (W, 20)], 100)
    assert reported.reasons[[0, 2, 3]].tolist() == [
        WaitReason.ADMITTED,
        WaitReason.BLOCKED,
        WaitReason.BLOCKED,
    ]
    assert (
        reported.first_values[0],
        reported.second_values[0],
        reported.first_values[2],
        reported.first_values[3],
    ) == (50, 100, 2, 3)
    reported = filled([(W, 50), (W, 60), (W, 10), (R, 20)], 100)
    assert reported.reasons[:3].tolist() == [
        WaitReason.ADMITTED,
        WaitReason.MEMORY,
        WaitReason.BLOCKED,
    ]
    assert (reported.first_values[1], reported.second_values[1]) == (110, 100)
    assert (reported.first_values[0], reported.peaks[0]) == (70, 70)
    reported = filled([(R, 1), (W, 1), (W, 1), (W, 1)], 100, slots=2)
    assert reported.reasons[1:].tolist() == [
        WaitReason.ADMITTED,
        WaitReason.SLOTS,
        WaitReason.BLOCKED,
    ]
    assert (reported.first_values[2], reported.second_values[2]) == (2, 2)


# Reference implementations

Need = Callable[[list[int]], float]


class Literal(NamedTuple):
    run: list[int]
    stop: int | None  # the first request that is neither admitted nor kept
    by_places: bool


def literal(
    runs: list[bool],
    need: Need,
    limit: float,
    slots: int,
    alone: bool,
    due: list[bool] | None = None,
) -> Literal:
    """The docstring of fill.py, one sentence per line."""
    count = len(runs)
    stays = [runs[i] and not (due and due[i]) for i in range(count)]
    ahead = stays.index(False) if False in stays else count
    # running requests ahead of all waiting ones stay, whatever the memory limit
    run = list(range(ahead))
    stop, by_places = None, False
    for i in range(ahead, count):  # the queue is taken in order until one does not fit
        exempt = i == 0 and (alone or runs[0]) and not any(stays) and slots > 0
        by_places = len(run) >= slots
        if by_places or (need([*run, i]) > limit and not exempt):
            stop = i
            break
        run.append(i)
    came = any(not runs[i] for i in run)
    behind = [i for i in range(count) if runs[i] and i not in run]
    for i in behind:  # a running request behind it continues if there is still room
        fits = len(run) < slots and need([*run, i]) <= limit
        # a running request is paused only if one ahead of it was admitted, or if its slice is
        # exhausted
        if not (came or due) or fits:
            run.append(i)
    return Literal(sorted(run), stop, by_places)


lines = st.lists(st.tuples(st.booleans(), st.integers(1, 40), st.integers(0, 30)), max_size=12)


@settings(max_examples=examples(500))
@given(lines, st.integers(0, 250), st.integers(0, 13), st.booleans(), st.booleans())
def test_fill_matches_reference_implementation(
    line: list[tuple[bool, int, int]], limit: int, slots: int, alone: bool, foreseen: bool
) -> None:
    runs = [runs for runs, _, _ in line]
    held = np.array([held for _, held, _ in line], float)
    left = np.array([left if foreseen else 0 for _, _, left in line], float)

    def need(rows: list[int]) -> float:
        return peak_tokens(held[rows], left[rows])

    given_runs = np.array(runs, bool)
    limits = np.array([float(limit)])
    demand = PeakDemand(held, limits, [left[None]]) if foreseen else SumDemand(held, limits)
    reported = fill_queue(given_runs, demand, slots, alone)
    expected = literal(runs, need, limit, slots, alone)
    assert np.flatnonzero(reported.runs_next).tolist() == expected.run
    assert reported.peaks[0] == need(expected.run)
    assert given_runs.tolist() == runs

    waiting = [i for i in range(len(line)) if not runs[i]]
    left_out = [i for i in waiting if i not in expected.run]
    for i in waiting:
        why = (
            WaitReason(int(reported.reasons[i])),
            reported.first_values[i],
            reported.second_values[i],
        )
        if i in expected.run:
            assert why == (WaitReason.ADMITTED, need(expected.run), limit)
        elif expected.by_places and i == left_out[0]:
            assert why == (WaitReason.SLOTS, len(expected.run), slots)
        elif i == expected.stop:
            assert why == (WaitReason.MEMORY, need(list(range(i + 1))), limit)
        else:
            assert why == (WaitReason.BLOCKED, i, 0)
    if not any(i in expected.run for i in waiting):
        assert expected.run == [i for i in range(len(line)) if runs[i]]


@settings(max_examples=examples(300))
@given(
    st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(1, 40)), min_size=1, max_size=12),
    st.integers(0, 250),
    st.integers(0, 13),
    st.booleans(),
)
def test_fill_matches_reference_implementation_with_exhausted_slices(
    line: list[tuple[bool, bool, int]], limit: int, slots: int, alone: bool
) -> None:
    runs = [runs for runs, _, _ in line]
    due = [runs and asks for runs, asks, _ in line]
    held = np.array([held for _, _, held in line], float)
    demand = SumDemand(held, np.array([float(limit)]), due=np.array(due))
    reported = fill_queue(np.array(runs), demand, slots, alone)
    expected = literal(runs, lambda rows: float(held[rows].sum()), limit, slots, alone, due)
    assert np.flatnonzero(reported.runs_next).tolist() == expected.run
    assert reported.peaks[0] == held[expected.run].sum()
    waits = [i for i in range(len(line)) if not runs[i] and not reported.runs_next[i]]
    assert all(reported.reasons[i] == WaitReason.BLOCKED for i in waits[1:])


def literal_places(
    line: list[tuple[bool, bool, int]], limit: float, slots: int, alone: bool
) -> list[int]:
    """The docstring of fill_slots: every request with KV keeps it; the others get memory in queue
    order; slots are assigned in queue order."""
    total = sum(held for runs, rests, held in line if runs or rests)
    able, fresh, full = [], 0, False
    for i, (runs, rests, held) in enumerate(line):
        if runs or rests:
            able.append(i)
            continue
        first = alone and fresh == 0 and not any(runs or rests for runs, rests, _ in line)
        full |= fresh >= slots or (total + held > limit and not first)
        if not full:
            total, fresh = total + held, fresh + 1
            able.append(i)
    return able[:slots]


@settings(max_examples=examples(300))
@given(
    st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(1, 40)), max_size=12),
    st.integers(0, 250),
    st.integers(0, 13),
    st.booleans(),
)
def test_fill_slots_matches_reference_implementation(
    line: list[tuple[bool, bool, int]], limit: int, slots: int, alone: bool
) -> None:
    runs = np.array([runs for runs, _, _ in line], bool)
    holds = np.array([runs or rests for runs, rests, _ in line], bool)
    held = np.array([held for _, _, held in line], float)
    demand = SumDemand(held, np.array([float(limit)]))
    queue = line_of(range(len(line))), runs, holds, demand
    reported = fill_slots(*queue, np.array([slots]), np.array([alone]))
    run = np.flatnonzero(reported.runs_next).tolist()
    assert run == literal_places(line, limit, slots, alone)
    waits = np.flatnonzero(~reported.runs_next & ~runs).tolist()
    assert all(reported.reasons[i] == WaitReason.ADMITTED for i in run if not runs[i])
    assert all(reported.reasons[i] == WaitReason.BLOCKED for i in waits[1:])
    if waits and reported.reasons[waits[0]] == WaitReason.MEMORY:
        fresh = [i for i in range(waits[0] + 1) if not holds[i]]
        need = float(held[holds].sum() + held[fresh].sum())
        assert (reported.first_values[waits[0]], reported.second_values[waits[0]]) == (need, limit)
        assert need > limit
    elif waits:
        assert reported.reasons[waits[0]] == WaitReason.SLOTS
        assert len(run) == slots


def test_fill_slots_blames_slots_while_paused_kv_stays_on_device() -> None:
    """The first waiting request is paused with KV and could run again; the second does not fit."""
    runs, holds = np.array([R, W, W]), np.array([True, True, False])
    demand, alone = SumDemand(np.full(3, 40.0), np.array([100.0])), np.array([False])
    reported = fill_slots(line_of(range(3)), runs, holds, demand, np.array([1]), alone)
    assert reported.runs_next.tolist() == [True, False, False]
    assert reported.reasons[1:].tolist() == [WaitReason.SLOTS, WaitReason.BLOCKED]
    assert (reported.first_values[1], reported.second_values[1]) == (1, 1)
