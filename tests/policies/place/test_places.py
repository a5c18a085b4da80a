"""Placement: worked examples, reference implementations and bounds."""

from collections import Counter
from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.costs import CostModel
from services.forecasttable import ForecastTable
from services.policies.decide import arrange
from services.policies.place.eligibility import (
    can_serve,
    current_workers,
    free_slots,
    select_placeable,
)
from services.policies.place.loads import cached_tokens, loads_in_seconds, work_by_worker_s
from services.policies.place.placements import PLACEMENTS
from services.policies.preset import choose
from services.policies.snapshot import CHAIN, NOWHERE, Snapshot
from services.runtime.codecs.arrange import (
    SentForecasts,
    decode_candidates,
    encode_candidates,
    encode_decision,
)
from services.scheduler.codec import decode_arrangement
from services.scheduler.links.arrangement_check import find_flaw
from tests.policies.made_snapshots import candidates, jobs, node, snapshots
from tests.policies.made_snapshots import table as forecasts
from tests.policies.place.contests import narrowed, placed, with_cached

COST = CostModel(base_s=0.01, prefill_token_s=0.001, decode_seq_s=0.002, context_token_s=1e-5)


# Work, in seconds


def test_work_s_matches_worked_example() -> None:
    """2,048 tokens of KV: 4 requests run at 512 each. The prompt has 100 tokens, 20 are generated,
    and 30 more are expected: 120 · 1 ms of prefill, 30 · (10/4 + 2) ms of steps and 30 · (120 +
    15) · 10 µs of context."""
    made = jobs(2, prompt=[100, 100], output=[20, 20], total=[50, 50], home=[1, 2], held=[0, 119])
    asked = candidates(made, [False, False], node(2, 2_048, cost=COST))
    here, there = 0.120 + 0.135 + 0.0405, 0.001 + 0.135 + 0.0405
    assert work_by_worker_s(asked, np.arange(len(asked.rows)))[:, 0] == pytest.approx([here, there])


def test_work_s_times_batch_size_is_scls_serve_time() -> None:
    """Its work times n is the T_serve of SCLS for n such requests, except for the step of the
    prefill itself and half a token of context per sequence and step."""
    made = jobs(1, prompt=[200], total=[64])
    worker = node(1, 2_048, cost=COST)
    [[mine]] = work_by_worker_s(candidates(made, [False], worker), np.arange(1))
    n, served = worker.full_seqs, COST.serve_s(worker.full_seqs, 200, 64)
    own_step = COST.base_s + COST.context_token_s * n * 200
    half = COST.context_token_s * n * 64 / 2
    assert n * mine == pytest.approx(served - own_step - half)


# Max-min


def literal_max_min(work: list[list[float]], there: list[float]) -> list[int]:
    """SCLS §4.4: repeatedly assign the longest remaining request to the least loaded worker."""
    left, loads, chosen = set(range(len(work))), list(there), [0] * len(work)
    while left:
        longest = min(left, key=lambda row: (-min(work[row]), row))
        best = min(range(len(loads)), key=lambda worker: loads[worker])
        loads[best] += work[longest][best]
        chosen[longest] = best + 1
        left.remove(longest)
    return chosen


@given(
    st.lists(st.integers(1, 400), min_size=1, max_size=7),
    st.lists(st.integers(0, 500), min_size=2, max_size=3),
)
def test_max_min_matches_reference_implementation(totals: list[int], loaded: list[int]) -> None:
    """Each worker starts with one running request; there are slots for all requests."""
    lengths = [*loaded, *totals]
    count, running = len(lengths), len(loaded)
    home = [*range(1, running + 1), *[NOWHERE] * len(totals)]
    held = [9] * running + [0] * len(totals)
    made = jobs(count, total=lengths, cap=[500] * count, home=home, held=held)
    workers = [node(i + 1, 4_096, cost=COST) for i in range(running)]
    asked = candidates(made, [row < running for row in range(count)], *workers)
    work = work_by_worker_s(asked, np.arange(len(asked.rows)))
    there = [float(work[i, i]) for i in range(running)]
    found = placed("max_min", asked)[running:]
    assert found == literal_max_min(work[running:].tolist(), there)


@given(st.lists(st.integers(1, 400), min_size=1, max_size=7), st.integers(2, 3))
def test_max_min_is_within_graham_bound_of_optimum(totals: list[int], machines: int) -> None:
    """Longest-first ends no later than 4/3 − 1/(3m) of the optimum over all assignments (Graham
    1969)."""
    made = jobs(len(totals), total=totals, cap=[500] * len(totals))
    workers = [node(i + 1, 4_096, cost=COST) for i in range(machines)]
    asked = candidates(made, [False] * len(totals), *workers)
    work = work_by_worker_s(asked, np.arange(len(asked.rows)))[:, 0]

    def ends_s(deal: Sequence[int]) -> float:
        return max(float(np.sum(work[np.array(deal) == i])) for i in range(1, machines + 1))

    best = min(ends_s(deal) for deal in product(range(1, machines + 1), repeat=len(totals)))
    assert ends_s(placed("max_min", asked)) <= (4 / 3 - 1 / (3 * machines)) * best + 1e-9


def test_max_min_matches_worked_example() -> None:
    """Lengths 7, 5, 4, 3 and 3 (tens of tokens) on two workers: 7 | 5, then 4 joins 5 and 3 joins
    7. The last 3 joins 5 + 4 (load 9), not 7 + 3 (load 10)."""
    totals = [30, 40, 30, 70, 50]
    made = jobs(5, total=totals, prompt=[1] * 5)
    two = [node(number, 4_096, cost=CostModel(0.0, 0.0, 0.01, 0.0)) for number in (1, 2)]
    found = placed("max_min", candidates(made, [False] * 5, *two))
    assert found == [1, 2, 2, 1, 2]


def test_slots_go_to_most_urgent_requests() -> None:
    """There are two slots: the two most urgent requests get them, though the third is the
    longest."""
    made = jobs(4, total=[10, 20, 90, 30])
    found = placed("max_min", candidates(made, [False] * 4, node(1, places=1), node(2, places=1)))
    assert found == [2, 1, NOWHERE, NOWHERE]


def test_large_worker_is_left_to_request_that_fits_nowhere_else() -> None:
    """The longer request is assigned first and fits both workers; the other fits only worker 2."""
    made = jobs(2, prompt=[10, 10], cap=[50, 500], total=[50, 5])
    small, large = node(1, 100, places=1), node(2, 1_000, places=1)
    asked = candidates(made, [False, False], small, large)
    assert placed("max_min", asked) == [1, 2]
    assert placed("max_min_prefix", asked) == [1, 2]


@settings(max_examples=200)
@given(st.data())
def test_select_placeable_matches_search_over_all_assignments(data: st.DataObject) -> None:
    """Compare with all assignments: a request is placeable if it fits beside those placed before
    it."""
    reaches = data.draw(st.lists(st.sampled_from([20, 50, 90]), min_size=1, max_size=3))
    free = [data.draw(st.integers(0, 2)) for _ in reaches]
    models = [data.draw(st.integers(0, 1)) for _ in reaches]
    lengths = data.draw(st.lists(st.sampled_from([15, 40, 80, 100]), min_size=1, max_size=5))
    wanted = [data.draw(st.integers(0, 1)) for _ in lengths]
    workers = [node(i + 1, reach, free[i], model=models[i]) for i, reach in enumerate(reaches)]
    count = len(lengths)
    made = jobs(count, prompt=[5] * count, cap=[n - 5 for n in lengths], model=wanted)
    asked = candidates(made, [False] * count, *workers)
    can = [set(np.flatnonzero(can_serve(asked, w, np.arange(count))).tolist()) for w in workers]

    def sits(rows: list[int]) -> bool:
        return any(
            all(row in can[w] for row, w in zip(rows, deal, strict=True))
            and all(deal.count(w) <= free[w] for w in range(len(workers)))
            for deal in product(range(len(workers)), repeat=len(rows))
        )

    expected: list[int] = []
    for row in range(count):
        if sits([*expected, row]):
            expected.append(row)
    rows, _ = select_placeable(asked, workers, free, np.arange(count))
    assert rows.tolist() == expected
    if len(workers) > 1:
        at = placed("max_min", asked)
        assert [row for row in range(count) if at[row] != NOWHERE] == expected


# Prefixes


def test_prefix_credit_matches_worked_example() -> None:
    """Worker 2 has 80 of 100 prompt tokens cached, at 1 ms a token; 10 output tokens take 10 ms
    each. With 79 ms more load at worker 2 the cached prefix wins by 1 ms; with 81 ms it loses by
    1 ms. With twice the weight it wins up to 160 ms."""
    cost = CostModel(0.0, 0.001, 0.01, 0.0)

    def chosen(more_s: float, weight: float = 1.0) -> int:
        made = jobs(
            2, prompt=[100, 1], output=[0, 9], held=[0, 10], home=[NOWHERE, 2],
            total=[10, 9 + 100 * more_s], cap=[100, 100],
        )  # fmt: skip
        asked = candidates(made, [False, True], node(1, cost=cost), node(2, cost=cost))
        assert loads_in_seconds(asked, current_workers(asked)).there.tolist() == pytest.approx(
            [0, more_s]
        )
        cached = with_cached(asked, [[0, 80], [0, 0]])
        return placed("prefix_aware", cached, prefix_weight=weight)[0]

    assert [chosen(0.079), chosen(0.081), chosen(0.159, 2.0), chosen(0.161, 2.0)] == [2, 1, 2, 1]


def test_prefix_aware_balances_load_without_cached_prefixes() -> None:
    made = jobs(6)
    asked = candidates(made, [False] * 6, node(1), node(2))
    assert Counter(placed("prefix_aware", asked)) == {1: 3, 2: 3}


def test_cached_prefix_reduces_load() -> None:
    """Two equal requests, both cached at worker 1: each takes 10 ms there and 90 ms at worker 2."""
    cost = CostModel(0.0, 0.001, 0.0, 0.0)
    made = jobs(2, prompt=[90, 90], total=[0, 0])
    asked = candidates(made, [False, False], node(1, cost=cost), node(2, cost=cost))
    for place in ("prefix_aware", "max_min_prefix"):
        assert placed(place, with_cached(asked, [[80, 0], [80, 0]])) == [1, 1]
    unlike = with_cached(asked, [[80, 0], [0, 0]])
    assert placed("prefix_aware", unlike, prefix_weight=0.0) == [1, 2]
    assert placed("max_min_prefix", unlike, prefix_weight=0.0) == [2, 1]  # 90 ms before 10 ms


@given(st.lists(st.lists(st.integers(1, 6), max_size=4), min_size=1, max_size=5), st.data())
def test_cached_tokens_stop_at_first_missing_block(
    chains: list[list[int]], data: st.DataObject
) -> None:
    """Blocks have 16 tokens and prompts 60. A 0 in a chain is an unknown block."""
    count = len(chains)
    workers = [
        node(i + 1, block_tokens=16, prefixes=[*data.draw(st.sets(st.integers(0, 6)))])
        for i in range(2)
    ]
    table = np.zeros((count + 1, CHAIN), np.int64)
    for row, chain in enumerate(chains):
        table[row + 1, : len(chain)] = chain
    made = jobs(count + 1, prompt=[60] * (count + 1))
    snapshot = Snapshot(
        0.0, made, np.arange(count + 1), np.arange(0), tuple(workers), forecasts(), table
    )
    rows = np.arange(1, count + 1)
    found = cached_tokens(snapshot, rows, made.select(rows))
    assert bool(found.size) == any(chain and chain[0] for chain in chains)
    found = found if found.size else np.zeros((count, 2), np.int64)
    for row, chain in enumerate(chains):
        for column, worker in enumerate(workers):
            blocks = 0
            while blocks < len(chain) and chain[blocks] in worker.prefixes.tolist():
                blocks += 1
            assert found[row, column] == min(60, 16 * blocks)


# Random snapshots


@settings(max_examples=150)
@given(snapshots(), st.integers(0, 2**32), st.sampled_from([0.0, 1.0, 2.0]))
def test_placement_respects_worker_limits_and_free_slots(
    snapshot: Snapshot, seed: int, gain: float
) -> None:
    asked = narrowed(snapshot, seed)
    made, workers = asked.jobs, {worker.number: worker for worker in asked.workers}
    for place, chosen in PLACEMENTS.items():
        params = {"move_gain": gain} if "move_gain" in chosen.params else {}
        at = np.array(placed(place, asked, **params))
        assert at.tolist() == placed(place, asked, **params)
        assert np.array_equal(at[asked.is_running], made.home[asked.is_running])
        rests = asked.is_paused_with_kv()
        stays = rests & (at == made.home)
        assert gain or place in ("least_load", "round_robin") or stays[rests].all()
        fresh = ~asked.is_running & ~rests
        free = dict(zip(workers, free_slots(asked), strict=True)) if fresh.any() else {}
        for number, worker in workers.items():
            dealt = np.flatnonzero(~asked.is_running & ~stays & (at == number))
            assert can_serve(asked, worker, dealt).all()
            if fresh.any():
                assert np.count_nonzero(fresh & (at == number)) <= free[number]
        assert set(at.tolist()) <= {*workers, NOWHERE}
        assert (at[rests] != NOWHERE).all()


@settings(max_examples=150)
@given(snapshots(), st.integers(0, 2**32))
def test_placement_leaves_no_usable_slot_free(snapshot: Snapshot, seed: int) -> None:
    asked = narrowed(snapshot, seed)
    if asked.is_running.all():
        return
    for place in PLACEMENTS:
        at = np.array(placed(place, asked))
        fresh = ~asked.is_running & ~asked.is_paused_with_kv()
        for worker, free in zip(asked.workers, free_slots(asked), strict=True):
            dealt = np.count_nonzero(fresh & (at == worker.number))
            if dealt < free:
                left = np.flatnonzero(at == NOWHERE)
                assert not can_serve(asked, worker, left).any()


@settings(max_examples=60)
@given(snapshots(), st.integers(0, 2**32), st.sampled_from(["max_min", "max_min_prefix"]))
def test_batcher_places_and_moves_as_in_process(snapshot: Snapshot, seed: int, place: str) -> None:
    """The batcher's answer also passes the check: no running request moves, but a paused one
    may."""
    asked = narrowed(snapshot, seed)
    preset = choose("alise", {"place": place, "move_gain": 0.01})
    mirror = ForecastTable(1)
    message = encode_candidates(asked, SentForecasts(snapshot.forecasts)).candidates
    there = decode_candidates(type(message).FromString(message.SerializeToString()), mirror)
    at_home = arrange(asked, snapshot.forecasts, preset, np.random.default_rng(0))
    apart = arrange(there, mirror, preset, np.random.default_rng(0))
    assert encode_decision(apart) == encode_decision(at_home)
    assert find_flaw(asked, decode_arrangement(encode_decision(apart))) == ""
