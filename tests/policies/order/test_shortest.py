"""srtf, gittins and tail: worked examples, brute force, and their bound on starvation."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.costs import CostModel
from services.forecast import Forecast, certain
from services.forecasttable import ForecastTable
from services.policies.memory import PolicyMemory
from services.policies.order.pace import measure_pace
from services.policies.order.ranking import Ranking
from services.policies.order.registry import ORDERS
from services.policies.order.shortest import least_ratio, mean_of_longest
from services.policies.snapshot import Snapshot
from tests.examples import examples
from tests.policies.made_snapshots import jobs, node, snapshots, table
from tests.policies.order.order_world import World, spread_of, stream

PLAIN = {"ageing_s": np.inf, "hysteresis": 0.25, "tail_weight": 0.5, "tail_share": 0.2}
A_SECOND_A_TOKEN = CostModel(1.0, 0.5, 0.0, 0.0)


def forecast(points: dict[float, float], cap: int = 1_000) -> Forecast:
    return Forecast(tuple(points), tuple(points.values()), cap)


def ranked(
    name: str,
    forecasts: Sequence[Forecast],
    output: Sequence[int] | None = None,
    running: int = 0,
    **params: float,
) -> Ranking:
    """A token takes a second. A request with output has its 10 prompt tokens in KV."""
    made = np.zeros(len(forecasts), np.int64) if output is None else np.array(output)
    interned = table(*forecasts)
    which, cap = np.arange(len(forecasts)), np.array([f.max_tokens for f in forecasts])
    of = jobs(
        len(forecasts),
        output=made,
        held=np.where(made > 0, 10 + made, 0),
        cap=cap,
        forecast=which,
        total=interned.mean(which, made, cap),
    )
    split = len(forecasts) - running
    worker = replace(node(), cost=A_SECOND_A_TOKEN)
    snapshot = Snapshot(
        0.0, of, np.arange(split), np.arange(split, len(forecasts)), (worker,), interned
    )
    return ORDERS[name].rank(snapshot, PLAIN | params, PolicyMemory())


# Worked examples. A request without KV needs 10 · 0.5 = 5 s for its prompt.

PROBABLY_SHORT = forecast({1: 0.75, 101: 0.25})  # mean 0.75 · 1 + 0.25 · 101 = 26
SURELY = forecast({20: 1.0})


def test_srtf_ranks_by_mean_and_gittins_by_index() -> None:
    """srtf: 26 + 5 s against 20 + 5 s. Gittins: stopping after the first token takes 6 s and ends 3
    of 4 requests, 6 / 0.75 = 8 s per end; continuing costs 31 s per end; the other request costs
    25 s."""
    assert ranked("srtf", [PROBABLY_SHORT, SURELY]).key.tolist() == [31, 25]
    assert ranked("gittins", [PROBABLY_SHORT, SURELY]).key.tolist() == [8, 25]


def test_gittins_index_grows_when_request_outlives_short_length() -> None:
    """After one token the first request needs 100 s, after two tokens 99 s."""
    found = ranked("gittins", [PROBABLY_SHORT, SURELY], output=[1, 0])
    assert found.key.tolist() == [100, 25]
    assert ranked("gittins", [PROBABLY_SHORT], output=[2]).key.tolist() == [99]


def test_tail_adds_weighted_tail_to_mean() -> None:
    """The longest fifth of the first request is 101 tokens: 106 s, 75 more than the mean, of which
    half is added. The other has no tail. With a share of ½ the longest half is half 101 and half 1
    tokens: 0.5 · 106 + 0.5 · 6 = 56 s, with full weight."""
    found = ranked("tail", [PROBABLY_SHORT, SURELY])
    assert found.key.tolist() == pytest.approx([31 + 0.5 * (106 - 31), 25])
    half = ranked("tail", [PROBABLY_SHORT], tail_share=0.5, tail_weight=1.0)
    assert half.key.tolist() == pytest.approx([56])
    assert ranked("tail", [PROBABLY_SHORT], tail_weight=0.0).key.tolist() == pytest.approx([31])
    assert ranked("tail", [PROBABLY_SHORT], tail_share=1.0).key.tolist() == pytest.approx([31])


@pytest.mark.parametrize(
    ("name", "rest"), [("srtf", 5.0), ("gittins", 5.0), ("tail", 5 + 0.5 * 5 * np.log(5))]
)
def test_shortest_orders_expect_outlived_length_again(name: str, rest: float) -> None:
    """A request at the end of its forecast of 5 tokens has an exponential rest with a mean of 5.
    The longest fifth of it has a mean of 5 + 5 ln 5. The permitted tokens limit it."""
    beyond = ranked(name, [forecast({5: 1.0}, cap=45)], output=[5])
    assert beyond.key.tolist() == pytest.approx([rest], rel=0.03)
    limited = ranked(name, [forecast({5: 1.0}, cap=6)], output=[5])
    assert limited.key.tolist() == pytest.approx([1], rel=0.1)


def test_srtf_hysteresis_protects_running_request() -> None:
    """The running request needs 20 s, so requests below 20 / 1.25 = 16 s precede it."""
    others = [certain(11), certain(10), certain(40)]
    found = ranked("srtf", [*others[:2], others[2]], output=[0, 0, 20], running=1)
    assert found.key.tolist() == [16, 15, 20]
    assert found.queue_key.tolist() == [16, 15, 16]
    never = ranked("srtf", others, output=[0, 0, 20], running=1, hysteresis=np.inf)
    assert never.queue_key.tolist() == [16, 15, -np.inf]
    come = ranked("srtf", others, output=[0, 0, 0], running=1)
    assert come.queue_key[2] == -np.inf  # it was admitted in this round


# Brute force


def brute_gittins(points: list[tuple[float, float]]) -> float:
    """Minimum of E[min(S, d)] / P(S ≤ d) over many d, including the points."""
    last = max(second for second, _ in points)
    tried = {second for second, _ in points} | {last * i / 40 for i in range(1, 41)}
    best = np.inf
    for d in tried:
        chance = sum(mass for second, mass in points if second <= d)
        if chance > 0:
            best = min(best, sum(mass * min(second, d) for second, mass in points) / chance)
    return best


def brute_tail(points: list[tuple[float, float]], weight: float, share: float) -> float:
    mean = sum(second * mass for second, mass in points)
    left, worst = share, 0.0
    for second, mass in sorted(points, reverse=True):
        taken = min(mass, left)
        worst, left = worst + taken * second, left - taken
    return mean + weight * (worst / share - mean)


def test_pace_is_divided_by_the_tokens_of_a_step() -> None:
    """Time per token of the fleet: the mean over its workers. Prefill is not divided."""
    cost = CostModel(0.1, 0.01, 0.2, 0.001)
    workers = (node(cost=cost), node(2, cost=replace(cost, tokens_per_step=2.0)))
    none = np.zeros(0, np.int64)
    snapshot = Snapshot(0.0, jobs(0), none, none, workers, table())
    pace, _ = measure_pace(snapshot, PolicyMemory())
    assert pace.token_s == pytest.approx((0.3 + 0.15) / 2)
    assert pace.context_token_s == pytest.approx((0.001 + 0.0005) / 2)
    assert pace.prefill_token_s == pytest.approx(0.01)


def remaining(snapshot: Snapshot, row: int) -> list[tuple[float, float]]:
    """Return the seconds to each possible length of the request, with probabilities."""
    made = snapshot.jobs
    pace, _ = measure_pace(snapshot, PolicyMemory())
    points, weights = snapshot.forecasts.points_of(int(made.forecast[row]))
    output, cap = int(made.output[row]), int(made.cap[row])
    ahead = [(p, w) for p, w in zip(points.tolist(), weights.tolist(), strict=True) if p > output]
    mass = sum(w for _, w in ahead)
    ahead = [(min(p, cap), w / mass) for p, w in ahead]
    if not ahead:  # 64 equal shares of an exponential
        rest = -points[-1] * np.log1p(-(np.arange(64) + 0.5) / 64)
        ahead = [(min(output + more, cap), 1 / 64) for more in rest.tolist()]
    context = int(made.prompt[row]) + output
    missing = max(0, context - int(made.held[row]))
    found = []
    for point, share in ahead:
        tokens = max(1.0, point - output)
        token_s = pace.token_s + pace.context_token_s * (context + tokens / 2)
        found.append((tokens * token_s + missing * pace.prefill_token_s, share))
    return found


@settings(max_examples=150)
@given(snapshots(), st.data())
def test_gittins_and_tail_match_brute_force(snapshot: Snapshot, data: st.DataObject) -> None:
    """Random forecasts, and costs that grow with context."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    own = ForecastTable(2)
    for _ in range(len(snapshot.jobs)):
        lengths = np.unique(rng.integers(1, 120, rng.integers(1, 64))).astype(float)
        masses = rng.random(len(lengths)) + 0.01
        own.intern(Forecast(tuple(lengths), tuple(masses / masses.sum()), 120))
    cost = CostModel(0.01, 0.002, 0.001, 0.0001)
    snapshot = replace(
        snapshot,
        forecasts=own,
        workers=tuple(replace(worker, cost=cost) for worker in snapshot.workers),
        jobs=replace(snapshot.jobs, forecast=np.arange(len(snapshot.jobs))),
    )
    plain, tailed = PLAIN, PLAIN | {"tail_weight": 1.5, "tail_share": 0.3}
    indexed = ORDERS["gittins"].rank(snapshot, plain, PolicyMemory())
    inflated = ORDERS["tail"].rank(snapshot, tailed, PolicyMemory())
    for at, row in enumerate(indexed.rows.tolist()):
        points = remaining(snapshot, row)
        assert indexed.key[at] == pytest.approx(brute_gittins(points))
        assert inflated.key[at] == pytest.approx(brute_tail(points, 1.5, 0.3))


@settings(max_examples=100)
@given(snapshots(), st.lists(st.integers(0, 2**32), min_size=1, max_size=4))
def test_cached_index_equals_recomputed_index(snapshot: Snapshot, seeds: list[int]) -> None:
    """Outputs grow, KV comes and goes, and a shared forecast is updated."""
    forecasts = snapshot.forecasts
    memory = {name: PolicyMemory() for name in ("gittins", "tail")}
    for seed in seeds:
        for name in memory:
            found = ORDERS[name].rank(snapshot, PLAIN, memory[name])
            anew = ORDERS[name].rank(snapshot, PLAIN, PolicyMemory(memory[name].numbers))
            assert found.key.tolist() == anew.key.tolist()
            memory[name] = found.memory
        rng = np.random.default_rng(seed)
        old = snapshot.jobs
        grown = np.where(rng.random(len(old)) < 0.5, old.output, old.output + 1)
        held = np.where(rng.random(len(old)) < 0.5, old.held, 0)
        if rng.random() < 0.5:
            forecasts.put(0, [7.0, 70.0], [0.5, 0.5])
        snapshot = replace(snapshot, jobs=replace(old, output=grown, held=held))


@given(st.lists(st.tuples(st.floats(0.1, 50), st.floats(0.01, 1)), min_size=1, max_size=12))
def test_index_functions_ignore_padding(points: list[tuple[float, float]]) -> None:
    """A row is padded with zero mass before its first point, and with its last point at the end."""
    ordered = sorted(dict(points).items())
    mass = sum(weight for _, weight in ordered)
    seconds = np.array([[0.05, *(s for s, _ in ordered), ordered[-1][0]]])
    masses = np.array([[0.0, *(w / mass for _, w in ordered), 0.0]])
    plain = [(s, w / mass) for s, w in ordered]
    spread = spread_of(seconds[0].tolist(), seconds[0].tolist(), masses[0].tolist())
    assert least_ratio(1, spread)[0] == pytest.approx(brute_gittins(plain))
    assert mean_of_longest(seconds.T, masses.T, 0.25)[0] == pytest.approx(
        brute_tail(plain, 1.0, 0.25)
    )


@settings(max_examples=examples(100))
@given(st.integers(1, 64), st.integers(0, 2**32), st.sampled_from([0.3, 1.0, 3.0]))
def test_least_ratio_equals_minimum_over_all_ends(count: int, seed: int, width: float) -> None:
    """Points of a row are looked at in windows, and not after the ratio is known."""
    rng = np.random.default_rng(seed)
    lengths = np.sort(rng.lognormal(3, width, count)) + 1
    seconds, masses = 0.5 + lengths * rng.uniform(0.5, 1), rng.dirichlet(np.ones(count))
    seconds = np.sort(seconds)
    for gained in (np.divide, lambda masses, _: masses):
        ends = [
            (np.minimum(seconds, end) @ masses) / gained(masses, lengths)[seconds <= end].sum()
            for end in seconds
        ]
        found = least_ratio(1, spread_of(lengths, seconds, masses), gained)
        assert found[0] == pytest.approx(min(ends), rel=1e-9)


# Starvation. One slot; requests of 2 s arrive every second, and three need 5 s.


def long_requests_end_within_bound(name: str, ageing_s: float) -> list[bool]:
    """Whether each request ended within `ageing_s` plus the work before it: 30 s, 5 s per request,
    and one token of a running request."""
    world = World(name, ageing_s=ageing_s)
    for each in "xyz":
        world.submit(each, 5)
    world.go(60, stream(world, 1, 2))
    return [world.ended.get(each, np.inf) <= 30 + 5 * n + 1 for n, each in enumerate("xyz", 1)]


@pytest.mark.parametrize("name", ["srtf", "gittins", "tail"])
def test_ageing_bounds_starvation_under_overload(name: str) -> None:
    assert long_requests_end_within_bound(name, 30.0) == [True] * 3
    assert long_requests_end_within_bound(name, np.inf) == [False] * 3


@pytest.mark.parametrize("name", ["srtf", "gittins", "tail"])
def test_starved_request_precedes_shortest_first(name: str) -> None:
    """a, b and c need 9, 6 and 3 s. a is starved at 8 s and preempts b before its last second; a
    starved request is not preempted."""
    plain = World(name, hysteresis=0.0)
    for job, length in (("a", 9), ("b", 6), ("c", 3)):
        plain.submit(job, length)
    plain.go(18)
    assert plain.turns() == " ".join("c" * 3 + "b" * 6 + "a" * 9)
    aged = World(name, hysteresis=0.0, ageing_s=8.0)
    for job, length in (("a", 9), ("b", 6), ("c", 3)):
        aged.submit(job, length)
    aged.go(18)
    assert aged.turns() == " ".join("c" * 3 + "b" * 5 + "a" * 9 + "b")
