"""Migration of paused requests to a better worker: worked examples."""

import numpy as np

from services.costs import CostModel
from services.policies.decide import arrange
from services.policies.place.migration import plan_moves
from services.policies.preset import choose
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
