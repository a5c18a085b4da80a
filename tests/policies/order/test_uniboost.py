"""The uniboost order: worked examples, its kept places, its tail estimate, its bound on waits."""

from collections.abc import Sequence
from dataclasses import replace
from math import exp, inf, log

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.costs import CostModel
from services.forecast import Floats, Ints, certain
from services.policies.memory import PolicyMemory
from services.policies.order.boost import LEAST_WORK
from services.policies.order.ranking import Ranking
from services.policies.order.uniboost import (
    GAMMA,
    PARAMS,
    T95_S,
    T99_S,
    next_threshold,
    uniboost,
)
from services.policies.parameters import resolve
from services.policies.snapshot import Snapshot
from tests.examples import examples
from tests.policies.made_snapshots import jobs, node, snapshots, table
from tests.policies.order.order_world import World, stream

# A step takes 10 ms for any number of requests; a prompt token takes 1 ms.
COST = CostModel(0.01, 0.001, 0.0, 0.0)
NOW = 100.0


def board(split: int, **columns: Sequence[float] | Ints | Floats) -> Snapshot:
    """Requests before `split` wait, the others run on the only worker."""
    count = len(columns["prompt"])
    runs = np.arange(count) >= split
    plain: dict[str, Sequence[float] | Ints | Floats] = {
        "cap": np.full(count, 1_000),
        "home": np.where(runs, 1, -1),
        "held": np.where(runs, 10, 0),
        "arrival_s": np.full(count, NOW),
    }
    made = jobs(count, **{**plain, **columns})
    worker = node(1, 10_000, cost=COST)
    interned = table(*[certain(100)] * count)
    return Snapshot(NOW, made, np.arange(split), np.arange(split, count), (worker,), interned)


def ranked(snapshot: Snapshot, memory: PolicyMemory | None = None, **params: float) -> Ranking:
    return uniboost(snapshot, resolve("uniboost", PARAMS, params), memory or PolicyMemory())


def test_threshold_doubles_above_the_output():
    outputs = np.array([0, 31, 32, 33, 63, 64, 1_000])
    assert next_threshold(outputs, 32.0).tolist() == [32, 32, 64, 64, 64, 128, 1_024]
    assert next_threshold(np.array([2, 3, 5, 6]), 3.0).tolist() == [3, 6, 6, 12]


def test_boosted_arrivals_by_hand():
    """With γ = 1/s, one request at a time: prompts of 180 and 1,680 tokens and 32 steps are 0.5 and
    2 s of work, whatever the answers."""
    made = board(2, prompt=[180, 1_680], arrival_s=[NOW - 1, NOW - 2])
    boosts = [-log(1 - exp(-0.5)), -log(1 - exp(-2.0))]
    found = ranked(made, gamma=1.0)
    assert found.key.tolist() == pytest.approx([-1 - boosts[0], -2 - boosts[1]])
    other = replace(made, jobs=replace(made.jobs, total=np.array([5.0, 900.0])))
    assert ranked(other, gamma=1.0).key.tolist() == found.key.tolist()


def test_boost_vanishes_as_a_request_runs():
    """Both have run 0.18 s of prompt; 32 and 1,024 steps are 0.32 and 10.24 s of work."""
    made = board(2, prompt=[180, 180], output=[0, 600])
    first, second = ranked(made, gamma=1.0).key.tolist()
    assert first == pytest.approx(log(1 - exp(-0.5)))
    assert second == pytest.approx(log(1 - exp(-10.42)))


def test_started_request_keeps_its_place_until_its_next_threshold():
    """It starts at 40 tokens, so that it stays until it has 64. From there on, the boost of the
    queued request is the larger one. After a pause it stays until 128."""
    memory, places = PolicyMemory(), []
    for output, split in ((40, 1), (63, 1), (64, 1), (70, 1), (70, 2), (70, 1), (127, 1), (130, 1)):
        made = board(split, prompt=[20, 20], output=[0, output], held=[0, 20 + output])
        found = ranked(made, memory)
        memory = found.memory
        if split == 1:
            places.append("keeps" if found.queue_key[1] == -inf else "yields")
            assert found.key[0] < found.key[1]
    assert places == ["keeps", "keeps", "yields", "yields", "keeps", "keeps", "yields"]


def test_started_request_yields_only_to_smaller_keys():
    made = board(1, prompt=[20, 20], output=[0, 40], held=[0, 60], arrival_s=[NOW, NOW - 50])
    memory = ranked(made).memory
    later = replace(made, jobs=replace(made.jobs, output=np.array([0, 64])))
    found = ranked(later, memory)
    assert found.queue_key[1] == found.key[1] < found.key[0]


def test_percentiles_move_towards_the_responses_by_hand():
    """Of the first two, after 1 and 3 s: both are at most the largest. Then one above both, after 9
    s: t95 grows by e^(0.25 · 0.95), t99 by e^(0.25 · 0.99)."""
    made = board(3, prompt=[20] * 3, arrival_s=[NOW - 1, NOW - 3, NOW - 9])
    memory = ranked(made).memory
    memory = ranked(replace(made, queued=np.array([2])), memory).memory
    t95_s, t99_s = 3 * exp(-0.25 * 0.1), 3 * exp(-0.25 * 0.02)
    assert memory.number(T95_S) == pytest.approx(t95_s)
    assert memory.number(T99_S) == pytest.approx(t99_s)
    memory = ranked(replace(made, queued=np.array([], np.int64)), memory).memory
    assert memory.number(T95_S) == pytest.approx(t95_s * exp(0.25 * 0.95))
    assert memory.number(T99_S) == pytest.approx(t99_s * exp(0.25 * 0.99))
    again = ranked(replace(made, queued=np.array([], np.int64)), memory).memory
    assert again.numbers == memory.numbers


def test_gamma_moves_with_the_ratio_of_the_percentiles_by_hand():
    """A response of 4 s, after which t99/t95 is 10/5 · e^(0.25 · (0.05 - 0.01)). An exponential
    tail has ln 100 / ln 20, about 1.54."""
    known = {GAMMA: 2.0, T95_S: 5.0, T99_S: 10.0}
    made = board(1, prompt=[180], arrival_s=[NOW - 4])
    memory = ranked(made, PolicyMemory(known)).memory
    none = replace(made, queued=np.array([], np.int64))
    ratio = 2 * exp(0.25 * 0.04) / (log(100) / log(20))
    moved = 2.0 * ratio**0.05
    assert ranked(none, memory).memory.number(GAMMA) == pytest.approx(moved)
    assert ranked(none, memory, gamma=1.0, gamma_range=2.0).memory.number(GAMMA) == 2.0
    # The boost of the 0.5 s of work follows: -ln(1 - e^(-γ/2)) / γ.
    found = ranked(replace(made, jobs=replace(made.jobs, arrival_s=np.array([NOW]))), memory)
    assert found.key[0] == pytest.approx(log(1 - exp(-1.0)) / 2)


def test_percentiles_of_exponential_responses():
    """Responses with a mean of 10 s: in the mean over the second half of 4,000 responses, t95 and
    t99 are ln 20 · 10 s and ln 100 · 10 s within a tenth."""
    memory, found = PolicyMemory(), []
    for serial, response_s in enumerate(np.random.default_rng(0).exponential(10.0, 4_000), 1):
        made = board(1, prompt=[20], serial=[serial], arrival_s=[NOW - response_s])
        memory = ranked(made, memory).memory
        found.append((memory.number(T95_S), memory.number(T99_S)))
    means = np.mean(found[2_000:], axis=0).tolist()
    assert means == pytest.approx([log(20) * 10, log(100) * 10], rel=0.1)


@pytest.mark.parametrize("age_s", [1.0, 1_000.0])
def test_thousands_that_end_at_once_move_the_percentiles_at_most_to_theirs(age_s: float):
    """As when a gateway is lost. Both percentiles become the age of all, whether it is below or
    above them, and γ falls by the ratio of an exponential tail."""
    made = board(4_000, prompt=[20] * 4_000, arrival_s=[NOW - age_s] * 4_000)
    memory = ranked(made).memory.with_numbers(**{T95_S: 3.0, T99_S: 4.0, GAMMA: 2.0})
    none = replace(made, queued=np.array([], np.int64))
    numbers = ranked(none, memory, gamma=1.0).memory.numbers
    assert (numbers[T95_S], numbers[T99_S]) == pytest.approx((age_s, age_s))
    assert numbers[GAMMA] == pytest.approx(2.0 / (log(100) / log(20)))


@pytest.mark.parametrize(("shape", "rises"), [(0.5, True), (4.0, False)])
def test_gamma_rises_with_a_heavy_tail_and_falls_with_a_light_one(shape: float, rises: bool):
    """Weibull responses: the tail of shape 0.5 is heavier than exponential, that of 4 lighter."""
    memory = PolicyMemory()
    for serial, response_s in enumerate(np.random.default_rng(0).weibull(shape, 2_000), 1):
        made = board(1, prompt=[20], serial=[serial], arrival_s=[NOW - response_s])
        memory = ranked(made, memory, gamma=1.0, gamma_range=8.0).memory
    assert memory.number(GAMMA) == (8.0 if rises else 1 / 8)


@settings(max_examples=examples(100))
@given(snapshots(), st.integers(0, 2**32))
def test_request_precedes_all_that_arrive_later_than_the_largest_boost(
    snapshot: Snapshot, seed: int
):
    largest_s = -log(LEAST_WORK) / PARAMS["gamma"].default  # no request has ended
    spread_s = np.random.default_rng(seed).uniform(0, 4 * largest_s, len(snapshot.jobs))
    made = replace(snapshot.jobs, arrival_s=snapshot.now - spread_s)
    found = ranked(replace(snapshot, jobs=made))
    arrival_s = made.arrival_s[found.rows]
    later = arrival_s[None, :] - arrival_s[:, None] > largest_s
    assert (found.key[:, None] < found.key[None, :])[later].all()


def test_long_requests_end_under_a_stream_of_short_ones():
    """A request of 2 tokens arrives every second step, so that the worker is always busy with them.
    A high γ serves by arrival. A low one that stays low never serves the long ones."""
    ends = {}
    for gamma in (1.0, 1e-4):
        world = World("uniboost", gamma=gamma, gamma_range=1.0, stretch_tokens=1)
        for name in "xyz":
            world.submit(name, 50)
        world.go(400, stream(world, 2, 2))
        ends[gamma] = [world.ended.get(name, inf) for name in "xyz"]
    assert max(ends[1.0]) < 400
    assert min(ends[1e-4]) == inf


def test_uniboost_turns_by_hand():
    """A step is a second and γ is 0.1/s: 4, 8 and 16 tokens of work have boosts of 11.1, 6.0 and
    2.3 s. `a` keeps its place until it has 4 tokens, then `b` until it has 4. Now `a` comes first
    at -6.0, before `c` at 6 - 11.1 and `b` at 1 - 6.0. At 8 tokens, `a` comes last at -2.3."""
    world = World("uniboost", gamma=0.1, gamma_range=1.0, stretch_tokens=4)

    def arrive(step: int) -> None:
        if step == 0:
            world.submit("a", 10)
        if step == 1:
            world.submit("b", 6)
        if step == 6:
            world.submit("c", 3)

    world.go(19, arrive)
    assert world.turns() == "a a a a b b b b a a a a c c c b b a a"
