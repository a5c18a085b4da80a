"""Migration of paused requests to a better worker: worked examples."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from services.costs import CostModel
from services.policies.decide import arrange
from services.policies.place.eligibility import can_serve
from services.policies.place.loads import work_by_worker_s
from services.policies.place.migration import plan_moves
from services.policies.preset import choose
from services.policies.snapshot import Candidates, WorkerSnapshot
from tests.policies.made_snapshots import candidates, jobs, node
from tests.policies.made_snapshots import table as forecasts
from tests.policies.place.contests import with_cached


def paused_request_moves_to(home_s: float, gain: float, **rest: float) -> int:
    """Return the worker chosen for a request paused at worker 1. Another request runs at worker 1
    for `home_s` more seconds, and worker 2 is idle. Recomputing the context of 100 tokens takes
    0.1 s. Worker 1 has memory for one of the two requests."""
    cost = CostModel(0.0, 0.001, 0.01, 0.0)
    made = jobs(
        2, home=[1, 1], held=[99, 99], prompt=[90, 90], output=[10, 10],
        total=[10 + 100 * (home_s - 0.001), 20], cap=[700, 100],
    )  # fmt: skip
    asked = candidates(
        made,
        [True, False],
        node(1, 1_000, places=1, cost=cost),
        node(2, 1_000, cost=cost),
    )
    return int(plan_moves(asked, gain)[1])


def test_paused_request_moves_if_saved_wait_exceeds_recompute() -> None:
    assert [paused_request_moves_to(0.11, 1.0), paused_request_moves_to(0.09, 1.0)] == [2, 1]
    assert [paused_request_moves_to(0.31, 3.0), paused_request_moves_to(0.29, 3.0)] == [2, 1]
    assert paused_request_moves_to(5.0, 0.0) == 1


def test_paused_request_stays_if_it_fits_at_home() -> None:
    """Worker 1 has a free slot and memory for both requests, whatever their output."""
    cost = CostModel(0.0, 0.001, 0.01, 0.0)
    made = jobs(
        2, home=[1, 1], held=[99, 99], prompt=[90, 90], output=[10, 10], total=[500, 20],
        cap=[700, 100],
    )  # fmt: skip
    runs = [True, False]

    def goes(kv_tokens: int) -> int:
        home = node(1, kv_tokens, cost=cost)
        return int(plan_moves(candidates(made, runs, home, node(2, 1_000, cost=cost)), 1.0)[1])

    assert [goes(700), goes(699)] == [1, 2]  # 90 + 500 and 90 + 20


def test_paused_request_stays_if_other_worker_cannot_take_it() -> None:
    """Worker 2 lacks a slot, memory, the model or the context length: the request stays at worker
    1."""
    cost = CostModel(0.0, 0.001, 0.01, 0.0)
    made = jobs(
        3, home=[1, 1, 2], held=[99, 99, 50], prompt=[90, 90, 50], output=[10, 10, 1],
        total=[500, 20, 2], cap=[700, 100, 10],
    )  # fmt: skip

    def goes(kv_tokens: int = 1_000, places: int = 9, model: int = 0, reach: int = 1_000) -> int:
        home = node(1, 1_000, places=1, cost=cost)
        there = node(2, kv_tokens, places, model=model, reach_tokens=reach, cost=cost)
        return int(plan_moves(candidates(made, [True, False, True], home, there), 1.0)[1])

    assert goes() == 2
    assert [goes(kv_tokens=161), goes(places=1), goes(model=1), goes(reach=189)] == [1] * 4


def test_move_counts_earlier_moves_of_round() -> None:
    """Two requests are paused behind a long one; the first takes the only free slot of worker 2."""
    cost = CostModel(0.0, 0.001, 0.01, 0.0)
    made = jobs(
        3, home=[1] * 3, held=[99] * 3, prompt=[90] * 3, output=[10] * 3, total=[500, 20, 20],
        cap=[700, 100, 100],
    )  # fmt: skip
    home = node(1, 1_000, places=1, cost=cost)
    for places, expected in ((1, [1, 2, 1]), (2, [1, 2, 2])):
        asked = candidates(made, [True, False, False], home, node(2, 1_000, places, cost=cost))
        assert plan_moves(asked, 1.0).tolist() == expected


def test_cached_prefix_makes_move_cheaper() -> None:
    """Recomputing takes 0.1 s and moving saves 0.09 s, but 80 prompt tokens are cached at worker
    2."""
    cost = CostModel(0.0, 0.001, 0.01, 0.0)
    made = jobs(
        2, home=[1, 1], held=[99, 99], prompt=[90, 90], output=[10, 10], total=[18.9, 20],
        cap=[700, 100],
    )  # fmt: skip
    two = node(1, 1_000, places=1, cost=cost), node(2, 1_000, cost=cost)
    asked = candidates(made, [True, False], *two)
    assert plan_moves(asked, 1.0).tolist() == [1, 1]
    assert plan_moves(with_cached(asked, [[0, 0], [0, 80]]), 1.0).tolist() == [1, 2]


def test_moved_request_needs_blocks_for_its_tokens_only() -> None:
    """The paused request holds 60 blocks of 16 at worker 1 for 101 tokens. Worker 2 has 7 blocks,
    which are enough."""
    cost = CostModel(0.0, 0.001, 0.01, 0.0)
    made = jobs(
        2, home=[1, 1], held=[99, 99], prompt=[90, 90], output=[10, 11], blocks=[7, 60],
        total=[500, 12], cap=[700, 20],
    )  # fmt: skip
    preset = choose("alise", {"place": "max_min", "move_gain": 1.0, "watermark": 1.0})
    home = node(1, 1_000, places=1, block_tokens=16, cost=cost)
    asked = candidates(made, [True, False], home, node(2, 112, block_tokens=16, cost=cost))
    decision = arrange(asked, forecasts(), preset, np.random.default_rng(0))
    assert [share.run.tolist() for share in decision.workers] == [[0], [1]]


def moves_one_by_one(asked: Candidates, gain: float) -> list[int]:
    """`plan_moves` from its definition: each paused request in turn, with what is ahead of it
    counted anew."""
    made, workers = asked.jobs, asked.workers
    at = [int(home) for home in made.home]
    turn = sorted(range(len(at)), key=lambda i: (asked.queue_key[i], not asked.is_running[i], i))
    work = work_by_worker_s(asked, np.arange(len(asked.rows)))
    finals = made.context + made.expected_remaining
    paused = [i for i in turn if asked.is_paused_with_kv()[i]]
    order = {row: nth for nth, row in enumerate(turn)}
    for row in paused:
        before = [i for i in paused if order[i] < order[row]]

        def ahead(worker: WorkerSnapshot, row: int = row, before: list[int] = before) -> list[int]:
            runs = [i for i in range(len(at)) if asked.is_running[i] and at[i] == worker.number]
            if made.home[row] == worker.number:
                runs = [i for i in runs if order[i] < order[row]]
            return runs + [i for i in before if at[i] == worker.number]

        def fits(worker: WorkerSnapshot, row: int = row) -> bool:
            others = ahead(worker)
            room = sum(finals[i] for i in others) + finals[row] <= worker.room_tokens
            return len(others) < worker.max_running and bool(room)

        wait_s = [sum(work[i, k] for i in ahead(each)) for k, each in enumerate(workers)]
        recompute_s = [made.context[row] * each.cost.prefill_token_s for each in workers]
        here = next(k for k, each in enumerate(workers) if each.number == at[row])
        able = [
            k
            for k, each in enumerate(workers)
            if fits(each)
            and can_serve(asked, each, np.array([row]))[0]
            and wait_s[here] - wait_s[k] > gain * recompute_s[k]
        ]
        if able and not fits(workers[here]):
            best = min(able, key=lambda k: wait_s[k] + recompute_s[k])
            at[row] = workers[best].number
    return at


@given(st.integers(0, 2**32), st.integers(2, 5), st.integers(2, 160), st.sampled_from([0.5, 2.0]))
def test_moves_equal_those_found_one_by_one(seed: int, fleet: int, count: int, gain: float) -> None:
    """Costs are powers of two, so that all sums are exact."""
    rng = np.random.default_rng(seed)
    workers = [
        node(
            number, int(rng.integers(200, 4_000)), int(rng.integers(2, 24)),
            cost=CostModel(0.0, 2.0 ** -rng.integers(8, 12), 2.0 ** -rng.integers(4, 8), 0.0),
        )
        for number in range(1, fleet + 1)
    ]  # fmt: skip
    output = rng.integers(1, 20, count)
    made = jobs(
        count, home=rng.integers(1, fleet + 1, count), prompt=rng.integers(1, 90, count),
        output=output, held=rng.integers(1, 20, count),
        total=output + rng.integers(1, 200, count).astype(float), cap=np.full(count, 400),
    )  # fmt: skip
    asked = candidates(made, (rng.random(count) < 0.3).tolist(), *workers)
    assert plan_moves(asked, gain).tolist() == moves_one_by_one(asked, gain)
