"""The stages other than forming: candidates, placement, slices, victims, intervals and memory."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.costs import CostModel
from services.forecast import Floats, Ints
from services.policies.cadence import INTERVAL_S
from services.policies.decide import select_candidates
from services.policies.interval import INTERVALS
from services.policies.memory import PolicyMemory
from services.policies.place.placements import PLACEMENTS
from services.policies.preset import choose
from services.policies.slice import SLICES
from services.policies.snapshot import NOWHERE, Candidates, RequestColumns, Snapshot, WorkerSnapshot
from services.policies.victim import VICTIMS
from tests.examples import examples
from tests.policies.made_snapshots import (
    COST,
    candidates,
    jobs,
    node,
    ranking,
    snapshots,
    table,
)

FCFS = choose("fcfs")

# Candidates: the head of each queue


def literal_narrow(snapshot: Snapshot, key: dict[int, float]) -> set[int]:
    """Return the rows of all running requests, and the most urgent of each queue. A queue holds the
    requests paused at one worker, or those of one model and length that only some of its workers
    can hold."""
    jobs = snapshot.jobs

    def head(rows: list[int], workers: list[WorkerSnapshot]) -> list[int]:
        rows = sorted(rows, key=lambda row: (key[row], jobs.serial[row]))
        rows = rows[: sum(worker.max_running for worker in workers) + 1]
        room, total, taken = sum(worker.room_tokens for worker in workers), 0, []
        for row in rows:
            taken.append(row)
            total += int(jobs.prompt[row] + jobs.output[row])
            if total > room:
                break
        return taken

    queued = snapshot.queued.tolist()
    rests = {row for row in queued if jobs.home[row] != NOWHERE and jobs.held[row] > 0}
    chosen = set(snapshot.running.tolist())
    for worker in snapshot.workers:
        chosen |= set(head([r for r in rests if jobs.home[r] == worker.number], [worker]))
        able = [
            w for w in snapshot.workers
            if w.model == worker.model and w.reach_tokens >= worker.reach_tokens
        ]  # fmt: skip
        shorter = [
            w.reach_tokens for w in snapshot.workers
            if w.model == worker.model and w.reach_tokens < worker.reach_tokens
        ]  # fmt: skip
        least = max(shorter, default=0)
        kind = [
            r for r in queued
            if r not in rests and jobs.model[r] == worker.model
            and least < jobs.prompt[r] + jobs.cap[r] <= worker.reach_tokens
        ]  # fmt: skip
        chosen |= set(head(kind, able))
    return chosen


@settings(max_examples=examples(300))
@given(snapshots(), st.integers(0, 2**32))
def test_candidates_match_reference_implementation(snapshot: Snapshot, seed: int) -> None:
    """Few distinct keys make many of them equal: the older request goes first."""
    count = len(snapshot.queued) + len(snapshot.running)
    keys = np.random.default_rng(seed).integers(0, 3, count).astype(float)
    ranked = ranking(snapshot, keys)
    key = dict(zip(ranked.rows.tolist(), keys.tolist(), strict=True))
    found = select_candidates(snapshot, ranked, FCFS, 7)
    serial = snapshot.jobs.serial
    expected = sorted(literal_narrow(snapshot, key), key=lambda row: (key[row], serial[row]))
    assert found.rows.tolist() == expected
    assert found.round == 7
    assert found.is_running.tolist() == np.isin(found.rows, snapshot.running).tolist()
    assert found.key.tolist() == [key[row] for row in expected]
    assert found.jobs.serial.tolist() == serial[expected].tolist()


def test_candidates_are_oldest_on_equal_keys() -> None:
    serial = np.random.default_rng(0).permutation(1_000)
    snapshot = Snapshot(
        0.0,
        jobs(1_000, serial=serial),
        np.arange(1_000),
        np.arange(0),
        (node(places=9),),
        table(),
    )
    found = select_candidates(snapshot, ranking(snapshot, np.zeros(1_000)), FCFS, 1)
    assert found.jobs.serial.tolist() == list(range(10))


def test_candidates_are_empty_without_workers() -> None:
    snapshot = Snapshot(0.0, jobs(3), np.arange(3), np.arange(0), (), table())
    assert len(select_candidates(snapshot, ranking(snapshot, np.zeros(3)), FCFS, 1).rows) == 0


# Placement


def literal_least_load(asked: Candidates) -> list[int]:
    jobs, workers = asked.jobs, asked.workers
    weight = [float(jobs.context[i] + jobs.expected_remaining[i]) for i in range(len(jobs))]
    waits = [i for i in range(len(jobs)) if not asked.is_running[i]]
    at = [NOWHERE] * len(jobs)
    load: dict[int, float] = {}
    free: dict[int, int] = {}
    for w in workers:
        here = [i for i in range(len(jobs)) if jobs.home[i] == w.number]
        load[w.number] = sum(weight[i] for i in here) / w.full_speed
        first = min((asked.queue_key[i] for i in waits), default=0.0)
        stay = [i for i in here if asked.is_running[i] and asked.queue_key[i] <= first]
        free[w.number] = max(0, w.max_running - len(stay))
    for i in range(len(jobs)):
        if asked.is_running[i] or (jobs.home[i] != NOWHERE and jobs.held[i] > 0):
            at[i] = int(jobs.home[i])
    for i in waits:
        if at[i] != NOWHERE:
            continue
        able = [
            w for w in workers
            if w.model == jobs.model[i] and free[w.number] > 0
            and jobs.prompt[i] + jobs.cap[i] <= w.reach_tokens
        ]  # fmt: skip
        if able:
            best = min(able, key=lambda w: load[w.number])
            at[i] = best.number
            free[best.number] -= 1
            load[best.number] += weight[i] / best.full_speed
    return at


@settings(max_examples=examples(300))
@given(snapshots(), st.integers(0, 2**32))
def test_least_load_matches_reference_implementation(snapshot: Snapshot, seed: int) -> None:
    count = len(snapshot.queued) + len(snapshot.running)
    key = np.random.default_rng(seed).permutation(count).astype(float)
    found = select_candidates(snapshot, ranking(snapshot, key), FCFS, 1)
    assert PLACEMENTS["least_load"].assign(found, {}).tolist() == literal_least_load(found)


def dealt(place: str, count: int, *workers: WorkerSnapshot, number: int = 0) -> Counter[int]:
    asked = candidates(jobs(count), [False] * count, *workers, number=number)
    return Counter(PLACEMENTS[place].assign(asked, {}).tolist())


def test_least_load_gives_small_worker_proportional_share() -> None:
    small, large = node(1, 5_120, 256), node(2, 102_400, 256)
    shares = dealt("least_load", 105, small, large)
    assert shares[1] + shares[2] == 105
    assert shares[1] / 105 == pytest.approx(
        small.full_speed / (small.full_speed + large.full_speed), abs=0.01
    )


def test_least_load_gives_slow_worker_proportional_share() -> None:
    slow = replace(node(1), cost=CostModel(0.04, 0.0, 0.004, 0.0))
    shares = dealt("least_load", 100, slow, replace(node(2), cost=COST))
    assert shares == {1: 20, 2: 80}


def test_least_load_respects_slots() -> None:
    assert dealt("least_load", 10, node(1, places=2), node(2, places=3)) == {
        1: 2, 2: 3, NOWHERE: 5,
    }  # fmt: skip
    assert dealt("least_load", 10, node(1, places=2)) == {1: 2, NOWHERE: 8}


def test_round_robin_continues_across_rounds() -> None:
    three = [node(number) for number in (1, 2, 3)]
    assert dealt("round_robin", 9, *three) == {1: 3, 2: 3, 3: 3}
    alone = [dealt("round_robin", 1, *three, number=number) for number in range(6)]
    assert [next(iter(each)) for each in alone] == [1, 2, 3, 1, 2, 3]


# Slices, victims, intervals


def granted(name: str, made: RequestColumns, runs: Sequence[bool], size: int) -> list[int]:
    asked = candidates(made, runs, node())
    at = np.arange(len(made))
    limits = SLICES[name].limits(asked, node().number, at, {"slice_tokens": size})
    return [int(limit) for limit in limits]


def test_slices_match_worked_example() -> None:
    """A slice has 32 tokens; a running request with more than half a slice left keeps its limit.
    The plan counts with one slice, also of a request that was granted more."""
    made = jobs(
        6,
        output=[0, 10, 20, 84, 90, 50],
        limit=[0, 32, 32, 100, 95, 100],
        cap=[100] * 6,
    )
    runs = [False, True, True, True, False, True]
    assert granted("tokens", made, runs, 32) == [32, 32, 52, 100, 100, 82]
    assert granted("whole", made, runs, 32) == [100] * 6
    assert granted("turns", made, runs, 32) == [32, 32, 32, 100, 100, 100]


def test_slice_is_the_whole_answer_while_no_request_waits() -> None:
    made = jobs(2, output=[0, 10], limit=[32, 32], cap=[100, 200])
    assert granted("tokens", made, [True, True], 32) == [100, 200]


@pytest.mark.parametrize(("output", "limit"), [(5, 32), (6, 58)])
def test_slice_outlasts_two_plan_intervals(output: int, limit: int) -> None:
    """Two requests run, with 10 + 20 tokens of context: their step takes 0.02 + 2 · 0.001 +
    30 · 0.0001 = 0.025 s, so that 0.25 s from plan to plan are 10 steps. A slice has 32 + 2 · 10
    tokens, half a slice 26. The third request waits. Its limit does not depend on the others that
    are asked for."""
    worker = replace(node(), cost=CostModel(0.02, 1.0, 0.001, 0.0001))
    runs = [True, True, False]
    made = jobs(
        3, prompt=[10, 20 - output, 99], output=[0, output, 0], limit=[52, 32, 0], home=[1, 1, -1]
    )
    asked = replace(candidates(made, runs, worker), numbers={INTERVAL_S: 0.25})
    for at in ([0, 1, 2], [2], [1, 0]):
        limits = SLICES["tokens"].limits(asked, worker.number, np.array(at), {"slice_tokens": 32.0})
        assert limits.tolist() == [[52, limit, 52][row] for row in at]


def test_exhausted_turn_is_followed_by_another() -> None:
    made = jobs(3, output=[32, 31, 90], limit=[32, 32, 90], cap=[100, 100, 100])
    assert granted("turns", made, [True] * 3, 32) == [64, 32, 100]


@given(st.data())
def test_slice_renews_half_a_slice_and_plans_one_at_most(data: st.DataObject) -> None:
    cap = data.draw(st.integers(1, 500))
    output = data.draw(st.integers(0, cap - 1))
    limit = data.draw(st.integers(output, cap))
    size, runs = data.draw(st.integers(1, 600)), data.draw(st.booleans())
    made = jobs(2, output=[output, 0], limit=[limit, 0], cap=[cap, 1])
    planned, _ = granted("tokens", made, [runs, False], size)
    assert output < planned <= min(cap, output + size)
    assert planned >= min(cap, output + (size // 2 if runs else size))


def test_victim_orders_match_worked_example() -> None:
    made = jobs(4, admitted=[3, 1, 4, 2], serial=[1, 2, 3, 4])
    key = np.array([0.0, 5.0, 5.0, 1.0])
    all_run, two_enter = np.ones(4, bool), np.array([True, False, True, False])
    assert VICTIMS["newest"](made, all_run, key).tolist() == [2, 0, 3, 1]
    assert VICTIMS["newest"](made, two_enter, key).tolist() == [3, 1, 2, 0]
    assert VICTIMS["least_urgent"](made, all_run, key).tolist() == [2, 1, 3, 0]


def test_relief_victims_match_worked_example() -> None:
    """Final footprint times remaining tokens: (10+50)·40 = 2,400; (100+50)·20 = 3,000; (10+90)·30 =
    3,000, which arrived later; (500+5)·0 = 0, though it holds the most."""
    made = jobs(
        4,
        prompt=[10, 100, 10, 500],
        output=[10, 30, 60, 5],
        total=[50.0, 50.0, 90.0, 5.0],
        serial=[1, 2, 3, 4],
    )
    assert VICTIMS["relief"](made, np.ones(4, bool), np.zeros(4)).tolist() == [2, 1, 0, 3]


def test_intervals_match_worked_example() -> None:
    """The running requests have 40 tokens left at worker 1 and 400 at worker 2."""
    first = node(1)
    made = jobs(3, home=[1, 2, NOWHERE], total=[40.0, 400.0, 50.0])
    asked = candidates(made, [True, True, False], first, node(2), now=7.0)
    assert INTERVALS["events"].ends(asked, {}) == 7
    load_s = 40 / first.full_speed
    given_params = {"interval_share": 0.5, "interval_s": 0.01}
    assert INTERVALS["load"].ends(asked, given_params) == 7 + 0.5 * load_s
    assert INTERVALS["load"].ends(asked, given_params | {"interval_s": 3.0}) == 10
    assert INTERVALS["load"].ends(replace(asked, workers=()), given_params) == 7.01


def test_load_interval_is_at_most_ten_minutes() -> None:
    made = jobs(1, home=[1], total=[1e7])
    asked = candidates(made, [True], node(1))
    assert INTERVALS["load"].ends(asked, {"interval_share": 1.0, "interval_s": 3.0}) == 600


# Memory


def ints(*values: int) -> Ints:
    return np.array(values, np.int64)


def recalled(memory: PolicyMemory, name: str, rows: Ints, serials: Ints) -> Floats:
    [values] = memory.recall((name,), rows, serials)
    return values


def test_memory_belongs_to_request_not_row() -> None:
    first = PolicyMemory().with_columns(ints(0, 3), ints(10, 11), a=np.array([1.5, 2.5]))
    assert recalled(first, "a", ints(0, 3), ints(10, 11)).tolist() == [1.5, 2.5]
    assert recalled(first, "a", ints(0, 3), ints(12, 11)).tolist() == [0, 2.5]
    assert recalled(first, "a", ints(1, 2, 9), ints(10, 11, 12)).tolist() == [0, 0, 0]
    assert recalled(first, "b", ints(0), ints(10)).tolist() == [0]
    assert recalled(first, "a", ints(), ints()).tolist() == []


def test_next_memory_replaces_columns_without_changing_previous() -> None:
    first = PolicyMemory().with_numbers(n=1.0).with_columns(ints(0, 3), ints(10, 11), a=np.ones(2))
    later = first.with_numbers(n=2.0).with_columns(ints(1), ints(12), b=np.array([7.0]))
    assert (first.number("n"), later.number("n"), later.number("m", 9.0)) == (1, 2, 9)
    assert recalled(later, "a", ints(0, 3), ints(10, 11)).tolist() == [0, 0]
    assert recalled(later, "b", ints(1), ints(12)).tolist() == [7]
    assert recalled(first, "a", ints(0, 3), ints(10, 11)).tolist() == [1, 1]
    read = recalled(later, "b", ints(1), ints(12))
    read[:] = 0
    assert recalled(later, "b", ints(1), ints(12)).tolist() == [7]


@given(st.lists(st.dictionaries(st.integers(0, 6), st.integers(1, 9)), min_size=1, max_size=6))
def test_memory_matches_dictionary(rounds: list[dict[int, int]]) -> None:
    """Each round maps rows to serials; the stored value is ten times the serial."""
    memory = PolicyMemory()
    known: dict[tuple[int, int], int] = {}
    for owners in rounds:
        rows, serials = ints(*owners), ints(*owners.values())
        expected = [known.get((row, serial), 0) for row, serial in owners.items()]
        assert recalled(memory, "a", rows, serials).tolist() == expected
        memory = memory.with_columns(rows, serials, a=serials.astype(float) * 10)
        known = {(row, serial): serial * 10 for row, serial in owners.items()}


@given(st.lists(st.dictionaries(st.integers(0, 6), st.integers(1, 9)), min_size=1, max_size=6))
def test_notes_of_other_requests_are_kept(rounds: list[dict[int, int]]) -> None:
    """Each round writes one of two columns; the other column of a request stays."""
    memory = PolicyMemory()
    known: dict[tuple[str, int], tuple[int, int]] = {}  # by column and row: serial and value
    for nth, owners in enumerate(rounds):
        rows, serials = ints(*owners), ints(*owners.values())
        name = "ab"[nth % 2]
        memory = memory.with_notes(rows, serials, {name: serials.astype(float) * 10 + nth})
        for row, serial in owners.items():
            for each in "ab":
                if known.get((each, row), (0, 0))[0] != serial:
                    known.pop((each, row), None)
            known[name, row] = (serial, serial * 10 + nth)
        every = [(n, r, s) for n in "ab" for r in range(7) for s in range(1, 10)]
        for column, row, serial in every:
            (found,) = memory.notes.recall([column], ints(row), ints(serial))
            of_serial, number = known.get((column, row), (0, 0))
            assert found.tolist() == [number if of_serial == serial else 0]
