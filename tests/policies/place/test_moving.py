"""Who rests at one worker and is better off at another: by hand."""

import numpy as np

from services.costs import CostModel
from services.policies.decide import arrange
from services.policies.place.migration import moved
from services.policies.preset import choose
from tests.policies.made_snapshots import candidates, jobs, seat
from tests.policies.made_snapshots import table as forecasts
from tests.policies.place.contests import with_cached


def one_rests(home_s: float, gain: float, **rest: float) -> int:
    """A job that rests at the first of two workers, where another runs with so much left; the
    second is idle. Its context of 100 takes 0.1 s to make anew. Memory for one of them."""
    cost = CostModel(0.0, 0.001, 0.01, 0.0)
    made = jobs(
        2, home=[1, 1], held=[99, 99], prompt=[90, 90], output=[10, 10],
        total=[10 + 100 * (home_s - 0.001), 20], cap=[700, 100],
    )  # fmt: skip
    asked = candidates(
        made, [True, False], seat(1, 1_000, places=1, cost=cost), seat(2, 1_000, cost=cost)
    )
    return int(moved(asked, gain)[1])


def test_who_rests_moves_where_the_wait_saved_exceeds_the_recompute() -> None:
    assert [one_rests(0.11, 1.0), one_rests(0.09, 1.0)] == [2, 1]
    assert [one_rests(0.31, 3.0), one_rests(0.29, 3.0)] == [2, 1]
    assert one_rests(5.0, 0.0) == 1


def test_who_need_not_wait_at_home_stays() -> None:
    """There is a place for it and memory for both, whatever they make."""
    cost = CostModel(0.0, 0.001, 0.01, 0.0)
    made = jobs(
        2, home=[1, 1], held=[99, 99], prompt=[90, 90], output=[10, 10], total=[500, 20],
        cap=[700, 100],
    )  # fmt: skip
    runs = [True, False]

    def goes(kv_tokens: int) -> int:
        home = seat(1, kv_tokens, cost=cost)
        return int(moved(candidates(made, runs, home, seat(2, 1_000, cost=cost)), 1.0)[1])

    assert [goes(700), goes(699)] == [1, 2]  # 90 + 500 and 90 + 20


def test_nobody_moves_to_where_there_is_no_room() -> None:
    """Neither a place, nor memory, nor its model, nor its length: it waits where it is."""
    cost = CostModel(0.0, 0.001, 0.01, 0.0)
    made = jobs(
        3, home=[1, 1, 2], held=[99, 99, 50], prompt=[90, 90, 50], output=[10, 10, 1],
        total=[500, 20, 2], cap=[700, 100, 10],
    )  # fmt: skip

    def goes(kv_tokens: int = 1_000, places: int = 9, model: int = 0, reach: int = 1_000) -> int:
        home = seat(1, 1_000, places=1, cost=cost)
        there = seat(2, kv_tokens, places, model=model, reach_tokens=reach, cost=cost)
        return int(moved(candidates(made, [True, False, True], home, there), 1.0)[1])

    assert goes() == 2
    assert [goes(kv_tokens=161), goes(places=1), goes(model=1), goes(reach=189)] == [1] * 4


def test_the_second_to_move_counts_the_first() -> None:
    """Two rest behind a long one; the first takes the place that there is elsewhere."""
    cost = CostModel(0.0, 0.001, 0.01, 0.0)
    made = jobs(
        3, home=[1] * 3, held=[99] * 3, prompt=[90] * 3, output=[10] * 3, total=[500, 20, 20],
        cap=[700, 100, 100],
    )  # fmt: skip
    home = seat(1, 1_000, places=1, cost=cost)
    for places, expected in ((1, [1, 2, 1]), (2, [1, 2, 2])):
        asked = candidates(made, [True, False, False], home, seat(2, 1_000, places, cost=cost))
        assert moved(asked, 1.0).tolist() == expected


def test_a_cached_beginning_makes_moving_cheaper() -> None:
    """0.1 s to compute, 0.09 s of wait to be saved: but 80 of its prompt are there."""
    cost = CostModel(0.0, 0.001, 0.01, 0.0)
    made = jobs(
        2, home=[1, 1], held=[99, 99], prompt=[90, 90], output=[10, 10], total=[18.9, 20],
        cap=[700, 100],
    )  # fmt: skip
    two = seat(1, 1_000, places=1, cost=cost), seat(2, 1_000, cost=cost)
    asked = candidates(made, [True, False], *two)
    assert moved(asked, 1.0).tolist() == [1, 1]
    assert moved(with_cached(asked, [[0, 0], [0, 80]]), 1.0).tolist() == [1, 2]


def test_what_one_who_moves_holds_elsewhere_is_no_block_here() -> None:
    """It has 60 blocks of 16 at home, for 101 tokens; where it goes there are 7, which will do."""
    cost = CostModel(0.0, 0.001, 0.01, 0.0)
    made = jobs(
        2, home=[1, 1], held=[99, 99], prompt=[90, 90], output=[10, 11], blocks=[7, 60],
        total=[500, 12], cap=[700, 20],
    )  # fmt: skip
    preset = choose("alise", {"place": "max_min", "move_gain": 1.0, "watermark": 1.0})
    home = seat(1, 1_000, places=1, block_tokens=16, cost=cost)
    asked = candidates(made, [True, False], home, seat(2, 112, block_tokens=16, cost=cost))
    decision = arrange(asked, forecasts(), preset, np.random.default_rng(0))
    assert [share.run.tolist() for share in decision.workers] == [[0], [1]]
