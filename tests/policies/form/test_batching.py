"""Batches over rounds: who is sent where and when, what comes back, and what is never lost."""

from collections.abc import Mapping
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.costs import CostModel
from services.policies.arrange.batch_placement import UNASSIGNED, max_min, round_robin
from services.policies.decision import WaitReason
from services.policies.order.waiting import by_ratio
from services.policies.preset import PLACEMENTS_BY_ARRANGEMENT, choose, presets
from services.policies.snapshot import WorkerSnapshot
from tests.policies.form.batch_fleet import Fleet
from tests.policies.made_snapshots import seat

BATCHED = [name for name, row in presets().items() if row.arrangement == "batch"]
COST = CostModel(base_s=0.5, prefill_token_s=0.1, decode_seq_s=0.0, context_token_s=0.0)


def seats(count: int, kv_tokens: int = 10_000, slots: int = 99) -> tuple[WorkerSnapshot, ...]:
    return tuple(seat(number, kv_tokens, slots, cost=COST) for number in range(1, count + 1))


def begun(fleet: Fleet) -> list[tuple[float, int, list[int]]]:
    return [(each.now, each.worker, sorted(each.rows)) for each in fleet.told]


# Binding


def test_the_longest_goes_to_the_least_loaded() -> None:
    """Loads 5 and 0; batches of 3, 4 and 2 s: 4 → second (4), 3 → second (7), 2 → first (7)."""
    same = np.array([[3.0, 4.0, 2.0]] * 2)
    able = np.ones((2, 3), bool)
    assert max_min(np.array([5.0, 0.0]), same, able, -1).tolist() == [1, 1, 0]
    able[1, 1] = False  # the second can't take the longest: 4 → first (9), then 3 and 2 → second
    assert max_min(np.array([5.0, 0.0]), same, able, -1).tolist() == [1, 0, 1]
    able[:, 0] = False
    assert max_min(np.array([5.0, 0.0]), same, able, -1).tolist() == [UNASSIGNED, 0, 1]


@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=4),
    st.lists(st.integers(1, 30), max_size=8), st.integers(0, 2**32),
)  # fmt: skip
def test_max_min_is_what_it_is_defined_as(loads: list[int], takes: list[int], seed: int) -> None:
    """Each in turn, the longest first, to whoever has the least then of those that could."""
    able = np.random.default_rng(seed).random((len(loads), len(takes))) < 0.8
    found = max_min(np.array(loads, float), np.array([takes] * len(loads), float), able, 0)
    now = list(loads)
    for batch in sorted(range(len(takes)), key=lambda b: (-takes[b] if able[:, b].any() else 0, b)):
        could = [w for w in range(len(loads)) if able[w, batch]]
        if could:
            assert now[found[batch]] == min(now[w] for w in could) and found[batch] in could
            now[found[batch]] += takes[batch]
        else:
            assert found[batch] == UNASSIGNED


def test_max_min_is_within_four_thirds_of_the_best_there_is() -> None:
    """What the longest first is known for (Graham 1969), against every placing."""
    rng = np.random.default_rng(3)
    for _ in range(30):
        takes = rng.integers(1, 40, 6)
        chosen = max_min(np.zeros(3), np.array([takes] * 3, float), np.ones((3, 6), bool), -1)
        spans = [
            max(
                sum(t for t, w in zip(takes, way, strict=True) if w == worker)
                for worker in (0, 1, 2)
            )
            for way in product((0, 1, 2), repeat=6)
        ]
        made = max(int(takes[chosen == worker].sum()) for worker in (0, 1, 2))
        assert made <= min(spans) * 4 / 3


def test_turns_go_on_where_they_were() -> None:
    able = np.ones((3, 4), bool)
    nothing = np.zeros(3), np.zeros((3, 4))
    assert round_robin(*nothing, able, -1).tolist() == [0, 1, 2, 0]
    assert round_robin(*nothing, able, 0).tolist() == [1, 2, 0, 1]
    able[2] = False
    assert round_robin(*nothing, able, 0).tolist() == [1, 0, 1, 0]


# Over rounds


def test_sequence_level_by_hand() -> None:
    """Two workers, two at once; requests in turns to workers. The second's first batch takes three
    ticks for its longer member, and 5, whose turn it is there, waits though the first is idle."""
    fleet = Fleet("sls", seats(2), {"batch_size": 2})
    fleet.ask((4, 1), (4, 3), (4, 1), (4, 1), (4, 1), (4, 1))
    fleet.run(6)
    assert begun(fleet) == [(0, 1, [0, 2]), (0, 2, [1, 3]), (1, 1, [4]), (3, 2, [5])]
    assert fleet.over


def test_whoever_idles_takes_the_next() -> None:
    fleet = Fleet("vs", seats(2), {"batch_size": 2})
    fleet.ask((4, 1), (4, 3), (4, 1), (4, 1), (4, 1), (4, 1))
    fleet.run(5)
    assert begun(fleet) == [(0, 1, [0, 1]), (0, 2, [2, 3]), (1, 2, [4, 5])]


def test_slices_send_the_unfinished_behind_who_came_meanwhile() -> None:
    """Slices of 2, two at once. 0 needs 5 tokens and has made 2 when 2 and 3 have come."""
    fleet = Fleet("so", seats(1), {"batch_size": 2, "slice_tokens": 2})
    fleet.ask((4, 5), (4, 1))
    fleet.run(1)
    fleet.ask((4, 1), (4, 1))
    fleet.run(7)
    assert begun(fleet) == [(0, 1, [0, 1]), (2, 1, [2, 3]), (3, 1, [0]), (5, 1, [0])]
    assert [each.limits for each in fleet.told] == [(2, 2), (2, 2), (4,), (6,)]
    assert fleet.over and fleet.asked[0].preemptions == 2


def test_who_comes_back_is_cut_together_with_who_waits() -> None:
    """Both halves of the second batch: the round in which they come back cuts nothing yet."""
    fleet = Fleet("so", seats(1), {"batch_size": 3, "slice_tokens": 1})
    fleet.ask((4, 2), (4, 2))
    fleet.run(1)
    fleet.ask((4, 1))
    first = fleet.round()
    assert first.workers[0].pause.tolist() == [0, 1] and not len(first.workers[0].run)
    assert fleet.now < first.next_s < fleet.now + 1e-6
    assert sorted(fleet.round().workers[0].run.tolist()) == [0, 1, 2]


def test_an_interval_transcript() -> None:
    """One step of N prompts of L takes 1 + 0.1·N·L s, a slice of one token. Γ = 2, λ = 0.5.

    t = 0   nothing has been formed: {0} and {1} apart are 1 + 0.1·40 = 5 s and 1 + 0.1·10 = 2 s,
            together 1 + 0.1·2·40 = 9 s: two batches, one for each worker; T = max(0.5·2, 2) = 2 s
    t = 1   2 has come: it waits until 2, though a worker should idle
    t = 2   it is formed, of 1 + 0.1·20 = 3 s, for the second worker, which has ended: loads 5 and 3
            (the first still runs, for the test says so), so T = max(1.5, 2)
    """
    fleet = Fleet("scls", seats(2), {"slice_tokens": 1, "interval_s": 2.0, "interval_share": 0.5})
    fleet.ask((40, 1), (10, 1))
    first = fleet.round()
    assert begun(fleet) == [(0, 1, [0]), (0, 2, [1])]
    assert first.numbers["batch_until_s"] == 2.0
    assert first.notes["serve_s"].tolist() == [5.0, 2.0]
    fleet.now = 1.0
    fleet.asked[1].over, fleet.asked[1].runs = True, False
    fleet.ask((20, 1))
    waits = fleet.round()
    assert waits.next_s == 2.0 and len(fleet.told) == 2
    assert str(waits.explanations.for_row(2)) == "waits 1.0 s until the pool is cut into batches"
    fleet.now = 2.0
    last = fleet.round()
    assert begun(fleet)[2:] == [(2, 2, [2])]
    assert last.numbers["batch_until_s"] == 4.0
    assert last.not_before_s == 2.0  # rounds are not put off, only forming is


def test_the_interval_follows_the_least_load() -> None:
    """Two batches of 5 s for each: T = 0.5 · 10 = 5 s."""
    fleet = Fleet("scls", seats(2), {"slice_tokens": 1, "interval_s": 2.0, "batch_size": 1})
    fleet.ask((40, 1), (40, 1), (40, 1), (40, 1))
    decision = fleet.round()
    assert decision.numbers["batch_until_s"] == 5.0
    assert sorted(decision.notes["seat"].tolist()) == [1, 1, 2, 2]
    waiting = [
        str(decision.explanations.for_row(row)) for row in range(4) if not fleet.asked[row].runs
    ]
    assert sorted(waiting) == [
        "in a batch for worker 1, 0 batches ahead",
        "in a batch for worker 2, 0 batches ahead",
    ]


def test_bound_batches_are_sent_whatever_the_interval() -> None:
    fleet = Fleet("lb", seats(1), {"slice_tokens": 1, "interval_s": 50.0, "batch_size": 1})
    fleet.ask((40, 1), (10, 1), (20, 1))
    fleet.run(4)
    assert begun(fleet) == [(0, 1, [0]), (1, 1, [1]), (2, 1, [2])]


def test_where_all_is_idle_the_interval_keeps_nobody_waiting() -> None:
    fleet = Fleet("scls", seats(1), {"slice_tokens": 9, "interval_s": 50.0})
    fleet.ask((4, 1))
    fleet.run(1)
    fleet.ask((4, 1))
    fleet.run(1)
    assert begun(fleet) == [(0, 1, [0]), (1, 1, [1])]


def test_batches_of_a_lost_worker_go_to_another() -> None:
    fleet = Fleet("lb", seats(2), {"slice_tokens": 1, "interval_s": 50.0, "batch_size": 1})
    fleet.ask((40, 1), (40, 1), (10, 1), (10, 1))
    fleet.round()
    assert begun(fleet) == [(0, 1, [0]), (0, 2, [1])]
    fleet.workers = fleet.workers[:1]
    fleet.evict(1)
    fleet.asked[1].evictions = 0  # its worker is gone: that is no want of memory
    fleet.run(60)
    assert fleet.over
    assert [worker for _, worker, _ in begun(fleet)[2:]] == [1, 1, 1]


def test_the_highest_response_ratio_goes_next() -> None:
    """T = 1 + 0.1·N·L + 0.5·(G − 1) s. When the worker idles at t = 4:

    {1}: came at 0, (90, 1): serves in 10 s: (4 + 10)/10 = 1.4
    {2}: came at 2, (10, 1): serves in 2 s: (2 + 2)/2 = 2
    At t = 5: {1} 1.5 against {3}, (10, 1) that has just come: (0 + 2)/2 = 1.
    """
    fleet = Fleet("magnus", seats(1), {"wma_max": 1, "estimator": "linear"})
    fleet.ask((4, 4))
    fleet.round()
    fleet.ask((90, 1))
    fleet.run(2)
    fleet.ask((10, 1))
    fleet.run(3)
    fleet.ask((10, 1))
    fleet.run(3)
    assert begun(fleet) == [(0, 1, [0]), (4, 1, [2]), (5, 1, [1]), (6, 1, [3])]
    assert by_ratio(np.array([4.0, 2.0]), np.array([10.0, 2.0])).tolist() == [-1.4, -2.0]


def test_open_batches_take_who_comes_until_they_are_sent() -> None:
    fleet = Fleet("abp", seats(1))
    fleet.ask((10, 3))
    fleet.run(1)
    fleet.ask((10, 3))
    fleet.run(1)
    fleet.ask((11, 3), (900, 90))
    told = fleet.round().explanations
    assert str(told.for_row(2)) == "in a batch of 2, 0 batches ahead"
    assert str(told.for_row(3)) == "in a batch of 1, 1 batches ahead"
    fleet.run(5)
    assert begun(fleet) == [(0, 1, [0]), (3, 1, [1, 2]), (6, 1, [3])]


def test_a_batch_that_ran_out_of_memory_is_halved_and_closed() -> None:
    """Four together; 2 is evicted: the others stop too, and {2, 0} and {1, 3} come one after the
    other, for who was evicted is first in line. 4, which would have gone well with them, makes a
    batch of its own."""
    fleet = Fleet("abp", seats(1))
    fleet.ask(*[(10, 9)] * 4, foreseen=3)
    fleet.run(2)
    fleet.evict(2)
    fleet.ask((10, 9), foreseen=3)
    halved = fleet.round()
    assert halved.workers[0].pause.tolist() == [0, 1, 3] and halved.next_s < fleet.now + 1e-6
    assert halved.notes["closed"][np.argsort(halved.rows)].tolist() == [1, 1, 1, 1, 0]
    fleet.run(30)
    assert sorted(rows for _, _, rows in begun(fleet)[1:]) == [[0, 2], [1, 3], [4]]
    assert fleet.over


def test_one_alone_that_was_evicted_runs_again() -> None:
    fleet = Fleet("magnus", seats(1))
    fleet.ask((10, 9))
    fleet.run(2)
    fleet.evict(0)
    fleet.run(30)
    assert fleet.over and begun(fleet) == [(0, 1, [0]), (2, 1, [0])]


def test_a_small_worker_takes_of_a_batch_what_it_can_hold() -> None:
    """The batch is cut for the large one, which is busy: 3 of 5 padded to 14 fit 0.7 · 64."""
    workers = (seat(1, 64, 9, cost=COST), seat(2, 10_000, 9, cost=COST))
    fleet = Fleet("abp", workers)
    fleet.ask((900, 50))
    fleet.run(1)
    fleet.ask(*[(10, 4)] * 5, cap=4)
    fleet.run(10)
    assert begun(fleet)[:3] == [(0, 2, [0]), (1, 1, [1, 2, 3]), (5, 1, [4, 5])]


def test_static_batches_say_so_when_they_begin() -> None:
    for mode, lockstep in (("static", True), ("continuous", False)):
        fleet = Fleet("vs", seats(1), {"batch_mode": mode})
        fleet.ask((4, 2))
        assert [share.lockstep for share in fleet.round().workers] == [lockstep]
        assert [share.lockstep for share in fleet.round().workers] == [False]


def test_who_has_ended_leaves_a_continuous_batch_and_nobody_joins_it() -> None:
    fleet = Fleet("vs", seats(1), {"batch_mode": "continuous", "batch_size": 2})
    fleet.ask((4, 1), (4, 3), (4, 1))
    fleet.run(1)
    assert [each.over for each in fleet.asked] == [True, False, False]
    fleet.run(4)
    assert begun(fleet) == [(0, 1, [0, 1]), (3, 1, [2])]


# Whatever happens

changes = st.fixed_dictionaries({
    "batch_mode": st.sampled_from(["static", "continuous"]),
    "place": st.sampled_from(sorted(PLACEMENTS_BY_ARRANGEMENT["batch"])),
    "interval": st.sampled_from(["events", "load"]),
})  # fmt: skip


@pytest.mark.parametrize("form", ["fixed", "dp", "wma"])
@settings(max_examples=40, deadline=None)
@given(
    changes, st.sampled_from(["whole", "turns"]), st.sampled_from(["arrival", "hrrn", "fifo"]),
    st.integers(0, 2**32),
)  # fmt: skip
def test_all_are_served_nobody_twice_at_once_and_what_runs_fits(
    form: str, choices: Mapping[str, str], slices: str, order: str, seed: int
) -> None:
    """Any choices together, with evictions and a worker that comes and goes. Batches fit as they
    were planned: padded to the longest, with what each may make, or is foreseen to."""
    rng = np.random.default_rng(seed)
    given_row = {**choices, "slice": slices, "order": order, "form": form}
    if slices == "turns":
        given_row["slice_tokens"] = str(rng.integers(1, 9))
    workers = tuple(
        seat(number, int(rng.choice([80, 160])), int(rng.integers(1, 6)), block_tokens=4, cost=COST)
        for number in range(1, 4)
    )
    fleet = Fleet("vs", workers, given_row)
    for tick in range(400):
        if tick < 12:
            fleet.ask(
                *((int(rng.integers(1, 20)), int(rng.integers(1, 20))) for _ in range(2)), cap=40
            )
        if tick in (6, 9):
            for row in [n for n, each in enumerate(fleet.asked) if each.runs and each.home == 3]:
                fleet.evict(row)
                fleet.asked[row].evictions -= tick == 6  # first the worker goes, then its memory
        if tick < 30:
            fleet.workers = workers[:2] if 6 <= tick < 8 else workers
        fleet.rounds_until_settled()
        decision = fleet.decision
        runs = [row for share in decision.workers for row in share.run.tolist()]
        assert len(set(runs)) == len(runs)
        alive = {row for row, each in enumerate(fleet.asked) if not each.over}
        assert set(decision.explanations.rows.tolist()) | set(runs) == alive
        assert len(set(decision.explanations.rows.tolist())) == len(decision.explanations.rows)
        fleet.tick()
        if tick >= 12 and fleet.over:
            break
    assert fleet.over
    share = fleet.row.params.get("zeta", 1.0)
    for each in fleet.told:
        worker, makes = workers[each.worker - 1], each.expected if form == "wma" else each.makes
        assert len(each.rows) <= worker.max_running
        fits = each.tokens(makes, worker.block_tokens) <= share * worker.kv_tokens
        assert fits or len(each.rows) == 1


@pytest.mark.parametrize("preset", BATCHED)
def test_every_row_serves_all_it_is_asked(preset: str) -> None:
    quick = {"interval_s": 2.0} if choose(preset).interval == "load" else {}
    fleet = Fleet(preset, seats(2, 3_000, 20), quick)
    rng = np.random.default_rng(1)
    for _ in range(20):
        fleet.ask(
            *((int(rng.integers(5, 300)), int(rng.integers(1, 40))) for _ in range(3)), cap=300
        )
        fleet.run(1)
    fleet.run(600)
    assert fleet.over
    assert {each.worker for each in fleet.told} == {1, 2}


def test_who_fits_nowhere_is_told_so() -> None:
    fleet = Fleet("scls", seats(1, kv_tokens=100))
    fleet.ask((90, 20))
    told = fleet.round().explanations.for_row(0)
    assert told is not None and told.reason is WaitReason.NO_WORKER


def test_what_one_small_worker_leaves_of_a_batch_another_takes_at_once() -> None:
    """Cut for the large one, which is busy: of three that fit one by one, two go in one round."""
    small = [seat(number, 20, 9, cost=COST) for number in (1, 2)]
    fleet = Fleet("abp", (*small, seat(3, 10_000, 9, cost=COST)))
    fleet.ask((900, 50))
    fleet.run(1)
    fleet.ask(*[(10, 4)] * 3, cap=4)
    fleet.run(1)
    assert begun(fleet) == [(0, 3, [0]), (1, 1, [1]), (1, 2, [2])]
