"""ALISE's order as hand-worked tables: levels, ageing, promises."""

from dataclasses import replace
from math import exp, inf

import pytest

from services.core import Completion, FinishReason, Request, RequestProgress
from services.costs import CostModel
from services.forecast import Forecast, certain
from services.policies.preset import choose
from services.scheduler.core import events as ev
from tests.scheduler.rounds.alise_driver import FRONT, Driver, G, about


@pytest.mark.parametrize(
    ("tokens", "level"),
    [(1, 0), (50, 0), (51, 1), (100, 1), (101, 2), (200, 2), (201, 3), (400, 3), (999, 3)],
)
def test_alise_levels_double_from_base(tokens: int, level: int) -> None:
    d = Driver(levels=4)
    d.submit("a", tokens)
    assert d.levels() == {"a": level}


def test_alise_counts_prefill_of_missing_kv() -> None:
    d = Driver()
    d.step(ev.Costed("w0", CostModel(0.0, 0.002, 0.01, 0.0)), 0.0)
    d.submit("a", 30, prompt=100)
    assert d.remaining_s("a") == about(0.3 + 0.2)
    d.report(1.0, progress=(RequestProgress("a", 10, 60),))  # 110 tokens, 60 of them with KV
    assert d.remaining_s("a") == about(0.2 + 0.1)


def test_alise_step_time_is_shared_by_running_requests() -> None:
    """A step takes 40 ms plus 1 ms per sequence: of four running requests, each takes 11 ms per
    token. The number of running requests is tracked by doublings, so that ranks stay stable."""
    d = Driver(places=20, memory=1_000)
    d.step(ev.Costed("w0", CostModel(0.04, 0.0, 0.001, 0.0)), 0.0)
    pace_s = {}
    for count in range(1, 9):
        name = f"r{count}"
        d.submit(name, 100)
        pace_s[count] = d.remaining_s(name) / 100
    one, three, seven = (0.04 / seqs + 0.001 for seqs in (1, 3, 7))
    assert pace_s == about(
        {1: one, 2: one, 3: three, 4: three, 5: three, 6: three, 7: seven, 8: seven}
    )


def test_alise_runs_shortest_first_and_served_requests_need_less() -> None:
    d = Driver(places=1, hysteresis=inf)
    for name, tokens in {"a": 400, "b": 120, "c": 30, "d": 110, "e": 90}.items():
        d.submit(name, tokens)
    assert (d.running, d.queued) == (["a"], ["c", "e", "d", "b"])
    assert d.levels() == {"a": 3, "b": 2, "c": 0, "d": 2, "e": 1}
    d.progress("a", 320, 1.0)
    assert d.levels()["a"] == 1


def test_alise_ageing_lifts_one_queue_once() -> None:
    """A request moves up one queue after 10 s. Then nothing changes until it has waited as long as
    ageing through all queues would take, 40 s for four queues, and is at the front."""
    d = Driver(places=1, hysteresis=inf, ageing_s=10, levels=4)
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
    assert d.queued == ["c", "b"]  # both at level 1, where the shorter is first
    for now in (20.0, 24.0, 30.0, 39.9):
        d.step(ev.Tick(), now)
        assert (d.queued, d.levels()) == (["c", "b"], {"a": 0, "b": 1, "c": 1})
    assert d.state.next_deadline() == 40.0
    d.step(ev.Tick(), 40.0)
    assert (d.queued, d.levels()) == (["b", "c"], {"a": 0, "b": FRONT, "c": 1})
    d.step(ev.Tick(), 44.0)
    assert d.levels()["c"] == 1  # starved too, but one request is at the front already
    assert d.state.next_deadline() == inf
    d.report(45.0, finished=(Completion("a", 40, FinishReason.STOP),))
    assert (d.running, d.levels()) == (["b"], {"b": FRONT, "c": 1})
    d.report(46.0, finished=(Completion("b", 150, FinishReason.STOP),))
    assert (d.running, d.state.next_deadline()) == (["c"], inf)


def test_alise_order_differs_from_arrival_after_overload() -> None:
    """A short and a long request arrive every second, and the worker serves one request a second:
    many have waited longer than ageing takes through all queues. Only one of them is at the front;
    behind it, short requests still precede earlier long ones."""
    d = Driver(places=1, hysteresis=inf, ageing_s=2, levels=4)
    for at in range(200):
        d.submit(f"long{at}", 150, float(at))
        d.submit(f"short{at}", 20, at + 0.25)
        [name] = d.running
        d.report(at + 0.5, finished=(Completion(name, 20, FinishReason.STOP),))
    waiting = d.queued
    assert sum(now > 8 for now in (200 - d.state.jobs[n].request.arrival_s for n in waiting)) > 150
    assert sum(level == FRONT for level in d.levels().values()) == 1
    shorts = [at for at, name in enumerate(waiting) if name.startswith("short")]
    longs = [at for at, name in enumerate(waiting) if name.startswith("long")][1:]
    assert max(shorts) < min(longs)
    by_arrival = sorted(waiting, key=lambda name: d.state.jobs[name].request.arrival_s)
    assert waiting[1:] != [name for name in by_arrival if name != waiting[0]]


def test_alise_starvation_bound_is_earlier_arrivals() -> None:
    """Short requests arrive faster than they can be served, and a request is starved after 8 s.
    Each of the four long requests that arrived first is served once those before it have ended:
    after at most 8 s plus a second for each request served until then."""
    d = Driver(places=1, hysteresis=inf, ageing_s=2, levels=4)
    longs = [f"long{i}" for i in range(4)]
    d.submit("first", 20, 0.0)
    for name in longs:
        d.submit(name, 400, 0.0)
    served_s = {}
    for at in range(40):
        d.submit(f"a{at}", 20, at + 0.1)
        d.submit(f"b{at}", 20, at + 0.2)
        [name] = d.running
        served_s[name] = at + 0.5
        d.report(at + 0.5, finished=(Completion(name, 20, FinishReason.STOP),))
    assert [served_s[name] for name in longs] == [8.5 + i + 1 for i in range(4)]


def test_alise_runs_one_front_request_per_worker() -> None:
    """Two workers; at each, two long requests are paused while two short ones run. Once starved,
    the older request of each worker is at the front, even if both of one worker are older than
    those of the other. The younger one follows when the older has ended."""
    d = Driver(places=2, ageing_s=1, levels=2)
    d.attach("w1", places=2)
    for at, name in enumerate(("a", "b", "c", "d")):
        d.submit(name, 400, 0.1 * at)
        d.report(d.now, on=d.home(name), progress=(RequestProgress(name, 1, 11),))
    homes = {name: d.home(name) for name in "abcd"}
    for name in ("s", "t", "u", "v"):
        d.submit(name, 2, 0.5)
    assert sorted(d.running) == ["s", "t", "u", "v"]
    assert {name: d.home(name) for name in "abcd"} == homes
    older = {home: min(n for n, at in homes.items() if at == home) for home in ("w0", "w1")}
    younger = {home: max(n for n, at in homes.items() if at == home) for home in ("w0", "w1")}
    d.step(ev.Tick(), 3.0)
    assert d.at_front() == set(older.values())
    for home, name in older.items():
        [short, other] = list(d.state.workers[home].running)
        d.report(3.1, on=home, finished=(Completion(short, 2, FinishReason.STOP),))
        assert sorted(d.state.workers[home].running) == sorted([name, other])
        assert younger[home] not in d.at_front()
        d.report(3.2, on=home, finished=(Completion(name, 400, FinishReason.STOP),))
        assert sorted(d.state.workers[home].running) == sorted([younger[home], other])
        assert younger[home] in d.at_front()


def test_alise_front_admits_one_request_without_kv() -> None:
    """A front request without KV has no worker yet: beside another, one worker could get two.
    No younger request of another worker overtakes it."""
    d = Driver(places=1, ageing_s=1, levels=2, hysteresis=inf)
    d.attach("w1", places=1)
    for name in ("x", "y"):
        d.submit(name, 10)
    for at, name in enumerate("abc"):
        d.submit(name, 400, 0.1 * at)
    d.step(ev.Tick(), 3.0)
    assert d.levels() == {"x": 0, "y": 0, "a": FRONT, "b": 0, "c": 0}
    home = d.home("x")
    d.report(3.1, on=home, finished=(Completion("x", 10, FinishReason.STOP),))
    assert sorted(d.running) == ["a", "y"]
    d.step(ev.Tick(), 3.2)
    assert d.at_front() == {"a"}
    d.report(3.3, on=d.home("y"), finished=(Completion("y", 10, FinishReason.STOP),))
    assert sorted(d.running) == ["a", "b"]  # in order of arrival
    d.report(3.4, on=home, finished=(Completion("a", 400, FinishReason.STOP),))
    assert (sorted(d.running), d.at_front()) == (["b", "c"], {"c"})


def test_alise_front_request_is_not_preempted() -> None:
    d = Driver(places=1, ageing_s=1, levels=2)
    d.submit("x", 10)
    d.submit("a", 400)
    d.step(ev.Tick(), 2.0)
    d.report(2.1, finished=(Completion("x", 10, FinishReason.STOP),))
    d.progress("a", 1, 2.2)
    d.submit("tiny", 1, 2.3)
    d.step(ev.Tick(), 2.4)
    assert (d.running, d.queued) == (["a"], ["tiny"])


def test_alise_ended_wait_does_not_age() -> None:
    d = Driver(places=1, hysteresis=inf)
    d.submit("a", 40)
    d.submit("b", 150)
    d.report(5.0, finished=(Completion("a", 40, FinishReason.STOP),))
    assert (d.running, d.state.next_deadline()) == (["b"], inf)


def test_alise_exceeded_expectation_doubles_and_demotes() -> None:
    d = Driver()
    d.submit("a", 60)
    assert d.levels() == {"a": 1}
    d.progress("a", 59, 1.0)
    assert d.levels() == {"a": 0}
    d.progress("a", 60, 2.0)  # L̂ is exceeded: now 120, of which 60 remain; one level down
    assert (d.remembered("expected_tokens"), d.remaining_s("a")) == ({"a": 120}, about(0.6))
    assert d.levels() == {"a": 2}
    d.progress("a", 100, 3.0)
    assert d.levels() == {"a": 1}
    d.progress("a", 250, 4.0)  # exceeded twice: now 480, of which 230 remain; three levels down
    assert (d.remembered("expected_tokens"), d.levels()) == ({"a": 480}, {"a": 3 + 3})


def test_alise_expectation_is_at_most_max_tokens() -> None:
    d = Driver()
    d.submit("a", 600)
    d.progress("a", 700, 1.0)
    assert d.remembered("expected_tokens") == {"a": 1_000}
    level = d.levels()["a"]
    d.progress("a", 999, 2.0)
    assert d.levels()["a"] < level


def test_alise_expectation_is_conditional_mean() -> None:
    d = Driver()
    d.step(ev.Submitted(G, Request("a", "demo", 10, 1_000, 0.0, delivered_tokens=30)), 0.0)
    forecast = Forecast((20.0, 40.0, 80.0), (0.5, 0.25, 0.25), 1_000)
    d.step(ev.Forecasted((("a", forecast),)), 0.0)
    assert d.remembered("expected_tokens") == {"a": 60}


def test_oracle_preset_is_alise_with_true_lengths() -> None:
    oracle, alise = choose("alise-oracle"), choose("alise")
    assert oracle.predictor == "oracle"
    same = {name: getattr(alise, name) for name in ("name", "predictor", "about", "source")}
    assert replace(oracle, **same) == alise
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
        assert d.levels()[name] == 0  # no request is expected to be longer than it is
        d.report(1.0, finished=(Completion(name, tokens, FinishReason.LENGTH),))
    assert ended == ["a", "c", "b"]


def test_alise_improved_forecast_is_new_expectation() -> None:
    """A late or improved forecast replaces L̂ of a waiting request."""
    d = Driver(places=1, hysteresis=inf)
    for name, tokens in {"x": 10, "a": 300, "b": 200}.items():
        d.submit(name, tokens)
    assert d.queued == ["b", "a"]
    better = Forecast((20.0,), (1.0,), 1_000, "retrieval", 2)
    d.step(ev.Forecasted((("a", better),)), 1.0)
    assert (d.remembered("expected_tokens"), d.queued) == ({"x": 10, "a": 20, "b": 200}, ["a", "b"])


@pytest.mark.parametrize("output", [80, 81, 500, 999, 1_000])
def test_request_past_its_forecast_is_expected_to_be_as_long_again(output: int) -> None:
    """The last point is 80: past it, 80 more tokens are expected, but not beyond max_tokens."""
    d = Driver()
    d.step(ev.Submitted(G, Request("a", "demo", 10, 1_000, 0.0)), 0.0)
    d.step(ev.Forecasted((("a", Forecast((40.0, 80.0), (0.5, 0.5), 80)),)), 0.0)
    d.progress("a", output, 1.0)
    jobs = d.state.ledger.board.jobs
    left = 80 * (1 - exp(-(1_000 - output) / 80))
    assert jobs.expected_remaining[d.row("a")] == pytest.approx(left)
    assert d.state.drain_s >= 0 and d.remaining_s("a") > 0


def test_alise_front_holds_at_large_clock_values() -> None:
    """The order is the same after tens of millions of seconds."""
    d = Driver(places=1, ageing_s=1, levels=2, hysteresis=inf)
    d.state.ledger.board._serial = 30_000_000
    d.submit("x", 10)
    d.submit("a", 400)
    d.submit("b", 20, 1.0)
    d.step(ev.Tick(), 2.5)
    assert (d.levels()["a"], d.queued) == (FRONT, ["a", "b"])
