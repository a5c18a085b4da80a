"""ALISE's order as hand-worked tables: levels, ageing, promises."""

from math import inf

import pytest
from services.policies.preset import choose

from services.core import Completion, CostModel, FinishReason, Progress, Request
from services.forecast import Forecast, certain
from services.scheduler import events as ev
from tests.alise_driver import Driver, G, about


@pytest.mark.parametrize(
    ("tokens", "level"),
    [(1, 0), (50, 0), (51, 1), (100, 1), (101, 2), (200, 2), (201, 3), (400, 3), (999, 3)],
)
def test_levels_end_at_the_base_and_its_doublings(tokens: int, level: int) -> None:
    d = Driver(levels=4)
    d.submit("a", tokens)
    assert d.levels() == {"a": level}


def test_prefill_of_what_is_not_held_counts() -> None:
    d = Driver()
    d.step(ev.Costed("w0", CostModel(0.0, 0.002, 0.01, 0.0)), 0.0)
    d.submit("a", 30, prompt=100)
    assert d.state.jobs["a"].rank.remaining_s == about(0.3 + 0.2)
    d.report(1.0, progress=(Progress("a", 10, 60),))  # 110 tokens, 60 of them with KV
    assert d.state.jobs["a"].rank.remaining_s == about(0.2 + 0.1)


def test_a_step_is_shared_by_those_who_run() -> None:
    """A step of 40 ms and 1 ms a sequence: four that run together take 11 ms each a token. How
    many do is followed by doublings, so that ranks hold still."""
    d = Driver(places=20, memory=1_000)
    d.step(ev.Costed("w0", CostModel(0.04, 0.0, 0.001, 0.0)), 0.0)
    pace_s = {}
    for count in range(1, 9):
        name = f"r{count}"
        d.submit(name, 100)
        pace_s[count] = d.state.jobs[name].rank.remaining_s / 100
    one, three, seven = (0.04 / seqs + 0.001 for seqs in (1, 3, 7))
    assert pace_s == about(
        {1: one, 2: one, 3: three, 4: three, 5: three, 6: three, 7: seven, 8: seven}
    )


def test_the_shortest_goes_first_and_what_is_served_comes_to_need_less() -> None:
    d = Driver(places=1, hysteresis=inf)
    for name, tokens in {"a": 400, "b": 120, "c": 30, "d": 110, "e": 90}.items():
        d.submit(name, tokens)
    assert (d.running, d.queued) == (["a"], ["c", "e", "d", "b"])
    assert d.levels() == {"a": 3, "b": 2, "c": 0, "d": 2, "e": 1}
    d.progress("a", 320, 1.0)
    assert d.levels()["a"] == 1


def test_ageing() -> None:
    """Up one every 10 s from where the remaining time puts it, then to the front."""
    d = Driver(places=1, hysteresis=inf, ageing_s=10)
    d.submit("a", 40, 0.0)
    d.submit("b", 150, 0.0)
    d.submit("c", 120, 4.0)
    assert (d.queued, d.state.next_deadline()) == (["c", "b"], 10.0)
    d.step(ev.Tick(), 9.9)
    assert d.queued == ["c", "b"]
    d.step(ev.Tick(), 10.0)
    assert (d.queued, d.levels()) == (["b", "c"], {"a": 0, "b": 1, "c": 2})
    assert d.state.next_deadline() == 14.0
    d.step(ev.Tick(), 14.0)
    assert d.queued == ["c", "b"]  # both at level 1, where the shorter goes first
    for now in (20.0, 24.0, 30.0):
        d.step(ev.Tick(), now)
    assert (d.queued, d.levels()) == (["b", "c"], {"a": 0, "b": -1, "c": 0})
    d.step(ev.Tick(), 34.0)
    assert (d.queued, d.levels()["c"]) == (["b", "c"], -1)  # there, who came first
    assert d.state.next_deadline() == inf


def test_a_wait_that_ended_does_not_age() -> None:
    d = Driver(places=1, hysteresis=inf)
    d.submit("a", 40)
    d.submit("b", 150)
    d.report(5.0, finished=(Completion("a", 40, FinishReason.STOP),))
    assert (d.running, d.state.next_deadline()) == (["b"], inf)


def test_who_outlives_its_promise_has_it_doubled_and_moves_down_one() -> None:
    d = Driver()
    d.submit("a", 60)
    assert d.levels() == {"a": 1}
    d.progress("a", 59, 1.0)
    assert d.levels() == {"a": 0}
    d.progress("a", 60, 2.0)  # it did not end there: 120 are promised, 60 left, and one further
    rank = d.state.jobs["a"].rank
    assert (rank.promised_tokens, rank.remaining_s, rank.level) == (120, about(0.6), 2)
    d.progress("a", 100, 3.0)
    assert d.levels() == {"a": 1}
    d.progress("a", 250, 4.0)  # twice at once: 480 are promised, 230 left, and three further
    rank = d.state.jobs["a"].rank
    assert (rank.promised_tokens, rank.level) == (480, 3 + 3)


def test_a_promise_never_passes_max_tokens() -> None:
    d = Driver()
    d.submit("a", 600)
    d.progress("a", 700, 1.0)
    assert d.state.jobs["a"].rank.promised_tokens == 1_000
    level = d.levels()["a"]
    d.progress("a", 999, 2.0)
    assert d.levels()["a"] < level


def test_a_distribution_promises_its_mean_given_what_is_there() -> None:
    d = Driver()
    d.step(ev.Submitted(G, Request("a", "demo", 10, 1_000, 0.0, delivered_tokens=30)), 0.0)
    forecast = Forecast((20.0, 40.0, 80.0), (0.5, 0.25, 0.25), 1_000)
    d.step(ev.Forecasted((("a", forecast),)), 0.0)
    assert d.state.jobs["a"].rank.promised_tokens == 60


def test_the_oracle_preset_is_alise_with_lengths_that_are_true() -> None:
    oracle, alise = choose("alise-oracle"), choose("alise")
    assert oracle.predictor == "oracle"
    assert oracle.ordered() == alise.ordered()
    d = Driver("alise-oracle", places=1)
    for name, tokens in {"a": 70, "b": 40, "c": 10}.items():
        d.step(ev.Submitted(G, Request(name, "demo", 10, 1_000, 0.0)), 0.0)
        d.step(ev.Forecasted(((name, certain(tokens, "oracle")),)), 0.0)
    ended = []
    while d.running:
        [name] = d.running
        ended.append(name)
        tokens = {"a": 70, "b": 40, "c": 10}[name]
        d.progress(name, tokens - 1, 1.0)
        assert d.levels()[name] == 0  # nobody is ever taken to be longer than it is
        d.report(1.0, finished=(Completion(name, tokens, FinishReason.LENGTH),))
    assert ended == ["a", "c", "b"]
