"""Placement and admission where workers compute few LoRA adapters at a time, by hand."""

from collections.abc import Sequence

import numpy as np
import pytest

from services.forecast import certain
from services.policies.decide import decide
from services.policies.decision import AdapterSlotsFull
from services.policies.memory import PolicyMemory
from services.policies.place.adapters import WAITS_FOR_ADAPTER
from services.policies.place.placements import PLACEMENTS
from services.policies.preset import choose
from services.policies.snapshot import NOWHERE, Candidates, RequestColumns, Snapshot, WorkerSnapshot
from tests.policies.explanations import explanation
from tests.policies.made_snapshots import candidates, jobs, node, table

WAITS = WAITS_FOR_ADAPTER
TURN_STEPS = 100  # 1.1 s by the cost model of `node`: one request runs with full memory


def worker(number: int, slots: int, places: int = 99) -> WorkerSnapshot:
    return node(number, places=places, adapter_slots=slots, adapter_turn_steps=TURN_STEPS)


def requests(running: Sequence[tuple[int, int]], waiting: Sequence[int]) -> RequestColumns:
    """Running requests as pairs of adapter and worker, then waiting ones by adapter; 0: none."""
    adapters = [adapter for adapter, _ in running] + list(waiting)
    homes = [home for _, home in running] + [NOWHERE] * len(waiting)
    return jobs(len(adapters), adapter=adapters, home=homes, limit=[100] * len(adapters))


def asked(
    running: Sequence[tuple[int, int]],
    waiting: Sequence[int],
    *workers: WorkerSnapshot,
    waited_s: float = 0.0,
) -> Candidates:
    made = requests(running, waiting)
    runs = [i < len(running) for i in range(len(made))]
    return candidates(made, runs, *workers, now=waited_s)


def placed(given: Candidates) -> list[int]:
    """The workers of the waiting requests."""
    at = PLACEMENTS["least_load"].assign(given, {})
    workers: list[int] = at[~given.is_running].tolist()
    return workers


@pytest.mark.parametrize(
    ("slots", "waited_s", "expected"),
    [
        (2, 0.0, [1, WAITS, 1, 1]),  # the free slot is for 2; 3 waits; none and 1 pass it
        (2, 1.0, [1, WAITS, 1, 1]),
        (2, 1.2, [1, 1, 1, 1]),  # after a turn the worker's adapters take turns
        (1, 0.0, [WAITS, WAITS, 1, 1]),
        (3, 0.0, [1, 1, 1, 1]),
        (0, 0.0, [1, 1, 1, 1]),  # no limit
    ],
)
def test_request_waits_for_a_slot_of_its_adapter(slots, waited_s, expected) -> None:
    assert placed(asked([(1, 1)], [2, 3, 0, 1], worker(1, slots), waited_s=waited_s)) == expected


@pytest.mark.parametrize(
    ("running", "waiting", "expected"),
    [
        ([(1, 1), (2, 2)], [1, 2, 3], [1, 2, WAITS]),
        ([(1, 2), (2, 1)], [1, 2, 1, 2], [2, 1, 2, 1]),
        ([(1, 1)], [2, 1, 3], [2, 1, WAITS]),  # 2 takes the free slot, and 1 goes where it runs
        ([(1, 1), (1, 1), (1, 1)], [1, 2], [2, WAITS]),  # an idle worker's slot, against load
        ([], [1, 2, 1, 2, 0], [1, 2, 1, 2, 1]),
    ],
)
def test_request_goes_to_the_worker_that_runs_its_adapter(running, waiting, expected) -> None:
    assert placed(asked(running, waiting, worker(1, 1), worker(2, 1))) == expected


@pytest.mark.parametrize(("others", "expected"), [(0, 3), (1, 3), (2, 1), (3, 1)])
def test_adapter_takes_a_further_slot_at_twice_the_load(others: int, expected: int) -> None:
    """Worker 1 runs three requests of the adapter, worker 3 others and has a free slot."""
    running = [(1, 1)] * 3 + [(2, 2)] + [(0, 3)] * others
    workers = [worker(number, 1) for number in (1, 2, 3)]
    assert placed(asked(running, [1], *workers)) == [expected]


def test_waiting_for_an_adapter_takes_no_place_of_a_worker() -> None:
    given = asked([(1, 1)], [2, 2, 0, 1], worker(1, 1, places=2))
    assert placed(given) == [WAITS, WAITS, 1, NOWHERE]


def test_requests_that_wait_for_a_slot_hide_no_others_where_the_longest_are_first() -> None:
    """The two most urgent requests could take both free places, but must wait for a slot."""
    workers = [worker(number, 1, places=2) for number in (1, 2)]
    given = asked([(1, 1), (2, 2)], [3, 3, 0, 0], *workers)
    at = PLACEMENTS["max_min"].assign(given, {"move_gain": 0.0})
    assert at[2:4].tolist() == [WAITS, WAITS]
    assert sorted(at[4:].tolist()) == [1, 2]


def test_paused_request_stays_where_its_kv_is_and_counts() -> None:
    made = jobs(4, adapter=[1, 2, 3, 2], home=[1, 1, NOWHERE, NOWHERE], held=[9, 9, 0, 0])
    assert placed(candidates(made, [True, False, False, False], worker(1, 2))) == [1, WAITS, 1]


def test_requests_behind_many_that_wait_for_a_slot_are_admitted() -> None:
    """A request without a slot has its reason to wait, and other requests pass it."""
    made = requests([(1, 1)], [2] * 50 + [0, 1])
    queued, running = np.arange(1, len(made)), np.array([0])
    snapshot = Snapshot(0.0, made, queued, running, (worker(1, 1, places=4),), table(certain(50)))
    decision = decide(snapshot, choose("fcfs"), PolicyMemory(), np.random.default_rng(0))
    assert sorted(decision.workers[0].run.tolist()) == [0, 51, 52]
    why = explanation(decision.explanations, 1)
    assert why == AdapterSlotsFull(1, 1)
    assert str(why) == (
        "its adapter has no slot: adapters in use 1, adapter slots of the workers 1"
    )
