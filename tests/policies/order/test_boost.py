"""The boost order: worked examples, brute force, deadlines of tokens, and its bound on waits."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import exp, inf, log, sqrt

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.costs import CostModel
from services.forecast import Floats, Forecast, Ints, certain
from services.policies.memory import PolicyMemory
from services.policies.order.boost import LEAST_WORK, PARAMS, boost, boost_s, per_token_s
from services.policies.order.ranking import Ranking
from services.policies.parameters import resolve
from services.policies.snapshot import Snapshot
from tests.examples import examples
from tests.policies.made_snapshots import jobs, node, snapshots, table
from tests.policies.order.order_world import World, spread_of, stream

# A step takes 10 ms for any number of requests; prefill takes almost no time.
COST = CostModel(0.01, 1e-9, 0.0, 0.0)
NOW = 100.0


Columns = Mapping[str, Sequence[float] | Ints | Floats]


def board(
    forecasts: Sequence[Forecast], split: int, **columns: Sequence[float] | Ints | Floats
) -> Snapshot:
    """Requests before `split` wait, the others run on the only worker."""
    count = len(forecasts)
    runs = np.arange(count) >= split
    interned = table(*forecasts)
    plain: Columns = {
        "cap": np.full(count, 1_000),
        "total": np.array([each.mean() for each in forecasts]),
        "forecast": np.arange(count),
        "home": np.where(runs, 1, -1),
        "held": np.where(runs, 10, 0),
        "arrival_s": np.full(count, NOW),
        "since_s": np.full(count, NOW),
    }
    made = jobs(count, **{**plain, **columns})
    worker = node(1, 10_000, cost=COST)
    return Snapshot(NOW, made, np.arange(split), np.arange(split, count), (worker,), interned)


def ranked(snapshot: Snapshot, **params: float) -> Ranking:
    return boost(snapshot, resolve("boost", PARAMS, params), PolicyMemory())


def line(ranking: Ranking) -> list[int]:
    """Rows, most urgent first."""
    return [int(row) for row in ranking.rows[np.lexsort((ranking.rows, ranking.key))]]


# The boost


def test_boost_falls_from_large_to_nothing_with_the_work():
    """With γ = 1/s: b = ln(1 / (1 − e^−w)). Work of ln 2 has a boost of ln 2."""
    boosts = boost_s(np.array([1e-3, log(2), 50.0]), 1.0)
    assert boosts.tolist() == pytest.approx([-log(1 - exp(-1e-3)), log(2), 0.0], abs=1e-9)
    # Of half the work, with twice the γ, half the boost.
    assert boost_s(np.array([log(2) / 2]), 2.0)[0] == pytest.approx(log(2) / 2)


def test_boosted_arrivals_of_two_requests_by_hand():
    """One request runs at a time at 10 ms a token: 0.5 and 2 s of work, 2.5 s in all. With a decay
    of 2.5, γ is 1/s."""
    snapshot = board([certain(50), certain(200)], 2, arrival_s=[NOW - 1, NOW - 2])
    boosts = [-log(1 - exp(-0.5)), -log(1 - exp(-2.0))]
    expected = [-1 - boosts[0], -2 - boosts[1]]  # about -1.93 and -2.15
    assert ranked(snapshot, decay=2.5).key.tolist() == pytest.approx(expected, rel=1e-6)
    assert line(ranked(snapshot, decay=2.5)) == [1, 0]
    # A lower decay weighs sizes more, a higher one arrivals.
    assert line(ranked(snapshot, decay=0.1)) == [0, 1]
    later = board([certain(50), certain(200)], 2, arrival_s=[NOW - 1, NOW - 1.1])
    assert line(ranked(later, decay=2.5)) == [0, 1]
    assert line(ranked(later, decay=100.0)) == [1, 0]


def test_second_worker_halves_work_and_backlog():
    """Both are shares of the fleet's time, so that the boosts halve, too."""
    one = board([certain(50), certain(200)], 2)
    two = Snapshot(
        NOW, one.jobs, one.queued, one.running, (*one.workers, node(2, 10_000, cost=COST)),
        one.forecasts,
    )  # fmt: skip
    assert ranked(two).key.tolist() == pytest.approx((ranked(one).key / 2).tolist())


def test_running_request_is_preempted_by_work_less_by_the_hysteresis():
    """Both arrived at the same time; 1.25 times the work is the limit while work is a small part of
    the backlog."""
    made = [certain(79), certain(81), certain(100), certain(1_000)]
    found = ranked(board(made, 2, total=[79.0, 81.0, 100.0, 1_000.0]), decay=1e-3)
    assert found.key[0] < found.queue_key[2] < found.key[1] < found.key[2]
    never = ranked(board(made, 2), decay=1e-3, hysteresis=inf)
    assert never.queue_key[2:].tolist() == [-inf, -inf]


def test_running_request_that_can_meet_its_gap_budget_yields_to_less_than_half_of_its_work():
    """The limit is 1 + 2 · 0.5 times the work of the queued one, and 1.5 times without a gap budget
    or when the SLA cannot be met: 100 tokens take 1 s, and the end is due in 0.5 s."""
    made = [certain(49), certain(51), certain(65), certain(68), *[certain(100)] * 3]
    columns: Columns = {
        "mtpot_s": [inf] * 4 + [1.5, inf, 1.5],
        "deadline_s": [inf] * 6 + [NOW + 0.5],
    }
    found = ranked(board(made, 4, **columns), decay=1e-3, hysteresis=0.5)
    assert [int(np.sum(found.key[:4] < place)) for place in found.queue_key[4:]] == [1, 3, 3]


# The work


PROBABLY_SHORT = ([1.0, 101.0], [6.0, 106.0], [0.75, 0.25])  # tokens, seconds, masses


def work_s(lengths: list[float], seconds: list[float], masses: list[float]) -> float:
    found = per_token_s(1, spread_of(lengths, seconds, masses), 1.0)
    return float(found[0])


def test_work_of_a_known_size_is_between_its_rest_and_its_whole():
    """10 tokens a second apart, of which 4 are left: √(4 · 10). Of a new one: 10."""
    assert work_s([10.0], [4.0], [1.0]) == pytest.approx(sqrt(40))
    assert work_s([10.0], [10.0], [1.0]) == pytest.approx(10)


def test_work_of_an_unknown_size_is_that_of_its_short_ends():
    """Up to the first token: 6 s and a chance of 3/4 of an end that counts 1: 8. To the end: 31 s,
    and 3/4 + 1/4 · 1/101: about 41. After the first token: 100 s · 101."""
    assert work_s(*PROBABLY_SHORT) == pytest.approx(sqrt(8))
    outlived = ([1.0, 101.0], [1.0, 100.0], [0.0, 1.0])
    assert work_s(*outlived) == pytest.approx(sqrt(100 * 101))


@settings(max_examples=examples(100))
@given(st.data())
def test_work_matches_brute_force(data: st.DataObject):
    lengths = sorted(data.draw(st.sets(st.integers(1, 300), min_size=1, max_size=20)))
    seconds = sorted(data.draw(st.lists(st.floats(0.1, 50), min_size=len(lengths),
                                        max_size=len(lengths))))  # fmt: skip
    shares = data.draw(st.lists(st.floats(0.01, 1), min_size=len(lengths), max_size=len(lengths)))
    masses = [share / sum(shares) for share in shares]
    costs = []
    for d in seconds:
        ended = [i for i, second in enumerate(seconds) if second <= d]
        gain = sum(masses[i] / lengths[i] for i in ended)
        costs.append(sum(m * min(s, d) for m, s in zip(masses, seconds, strict=True)) / gain)
    found = work_s([float(length) for length in lengths], seconds, masses)
    assert found == pytest.approx(sqrt(min(costs)))


# Tokens in time


def test_first_token_that_is_due_precedes_shorter_requests():
    """The long request has 0.2 s left of a TTFT of 5 s. Its first token and its 900 tokens have the
    geometric mean of 30."""
    made = [certain(900), certain(31)]
    due: Columns = {"arrival_s": [NOW - 4.8, NOW - 4.8], "ttft_s": [5.0, inf]}
    assert line(ranked(board(made, 2, **due))) == [0, 1]
    assert line(ranked(board(made, 2, **due), early_s=0.1)) == [1, 0]
    assert line(ranked(board([certain(900), certain(29)], 2, **due))) == [1, 0]
    # Also when it is late already, until it has come.
    late: Columns = {**due, "ttft_s": [1.0, inf]}
    assert line(ranked(board(made, 2, **late))) == [0, 1]
    begun: Columns = {**late, "output": [1, 0], "held": [11, 0], "since_s": [NOW, NOW]}
    assert line(ranked(board(made, 2, **begun))) == [1, 0]


def test_running_request_with_a_due_first_token_keeps_its_boost():
    """Both are late, and equal but for the 500 prompt tokens that the running one has in KV. Its
    work is less, so that neither takes the place of the other after each round."""
    prefill = CostModel(0.01, 1e-3, 0.0, 0.0)
    made = board([certain(900), certain(900)], 1, prompt=[1_000] * 2, held=[0, 500],
                 arrival_s=[NOW - 9] * 2, ttft_s=[5.0] * 2)  # fmt: skip
    made = replace(made, workers=(replace(made.workers[0], cost=prefill),))
    queued, running = ranked(made, hysteresis=0.0).key.tolist()
    assert running < queued
    turned = replace(made, queued=made.running, running=made.queued)
    assert ranked(turned, hysteresis=0.0).key.tolist() == pytest.approx([running, queued])


def test_due_first_token_never_lowers_the_boost():
    """The prompt takes a second, longer than the five tokens behind it."""
    prefill = CostModel(0.01, 1e-3, 0.0, 0.0)
    made = board([certain(5), certain(5)], 2, prompt=[1_000] * 2, arrival_s=[NOW - 4.8] * 2,
                 ttft_s=[5.0, inf])  # fmt: skip
    made = replace(made, workers=(replace(made.workers[0], cost=prefill),))
    due, other = ranked(made).key.tolist()
    assert due <= other


def test_paused_request_counts_half_before_its_gap_is_late():
    """It was paused 1.3 s ago, and its longest gap is 1.5 s. Its work is √(20 · 40), that of the
    other request 20, so that half of it is less."""
    made = [certain(40), certain(20)]
    paused: Columns = {
        "output": [20, 0],
        "held": [30, 0],
        "since_s": [NOW - 1.3, NOW],
        "mtpot_s": [1.5, inf],
        "arrival_s": [NOW - 2, NOW - 2],
        "first_s": [NOW - 1.5, inf],
    }
    assert line(ranked(board(made, 2, **paused))) == [0, 1]
    assert line(ranked(board(made, 2, **paused), early_s=0.1)) == [1, 0]
    # Not when the gap is late, or another budget of its SLA is lost.
    assert line(ranked(board(made, 2, **{**paused, "mtpot_s": [1.2, inf]}))) == [1, 0]
    assert line(ranked(board(made, 2, **{**paused, "deadline_s": [NOW + 0.1, inf]}))) == [1, 0]
    # Not before a request with less than half of its work.
    assert line(ranked(board([certain(40), certain(10)], 2, **paused))) == [1, 0]


def test_next_round_is_due_when_a_token_is():
    made = board([certain(900), certain(5)], 2, arrival_s=[NOW - 4, NOW], ttft_s=[5.0, 5.0])
    assert ranked(made).next_s == pytest.approx(NOW + 0.75)
    assert ranked(board([certain(5)], 1)).next_s == inf


def test_request_of_a_tenant_above_its_share_goes_last():
    """The share of a tenant is half of 10,000 tokens. The first request of tenant 1 takes 4,010 of
    them, the second does not fit beside it. Tenant 2 has the longest request."""
    made = [certain(4_000), certain(4_500), certain(4_900)]
    cap = [5_000] * 3
    assert line(ranked(board(made, 3, cap=cap, tenant=[1, 1, 1]))) == [0, 1, 2]
    assert line(ranked(board(made, 3, cap=cap, tenant=[1, 1, 2]))) == [0, 2, 1]


# The bound


@settings(max_examples=examples(100))
@given(snapshots(), st.integers(0, 2**32))
def test_request_precedes_all_that_arrive_later_than_the_largest_boost(
    snapshot: Snapshot, seed: int
):
    gamma = PARAMS["decay"].default * max(1, len(snapshot.workers))
    gamma /= max(1e-3, float(ranked(snapshot).remaining_s.sum()))
    largest_s = -log(LEAST_WORK) / gamma
    spread_s = np.random.default_rng(seed).uniform(0, 4 * largest_s, len(snapshot.jobs))
    made = replace(snapshot.jobs, arrival_s=snapshot.now - spread_s)
    found = ranked(replace(snapshot, jobs=made))
    rows, arrival_s = found.rows, made.arrival_s[found.rows]
    for first in range(len(rows)):
        for second in range(len(rows)):
            if arrival_s[second] - arrival_s[first] > largest_s:
                assert found.key[first] < found.key[second]


def test_long_requests_end_under_a_stream_of_short_ones():
    """A request of 2 tokens arrives every second step, so that the worker is always busy with them.
    Three requests of 5 tokens wait at most for those that arrive within the difference of their
    boosts. Shortest first never serves them."""
    ends = {}
    for decay in (1.0, 1e-6):
        world = World("foretoken", decay=decay, early_s=0.0)
        for name in "xyz":
            world.submit(name, 5)
        world.go(60, stream(world, 2, 2))
        ends[decay] = [world.ended.get(name, inf) for name in "xyz"]
    assert max(ends[1.0]) < 60
    assert ends[1e-6] == [inf] * 3


def test_boost_turns_by_hand():
    """`a` of 6 tokens arrives first, `b` of 1 token two steps later. Its boost is larger than the
    two seconds between them, so it preempts; `c` of 6 tokens has no such boost and waits."""
    world = World("foretoken", decay=1.0, hysteresis=0.0)

    def arrive(step: int) -> None:
        if step == 0:
            world.submit("a", 6)
        if step == 2:
            world.submit("b", 1)
            world.submit("c", 6)

    world.go(13, arrive)
    assert world.turns() == "a a b a a a a c c c c c c"
