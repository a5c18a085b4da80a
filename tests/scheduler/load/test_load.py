"""Orders under load on a simulated worker in virtual time."""

from functools import cache

import numpy as np
import pytest

from services.policies.preset import presets
from tests.scheduler.load.scheduler_load import Ask, Load, LoadResult

MEMORY = 3_000  # a quarter of the KV of all requests of the load
LEVELS = 8


@cache
def bimodal(error: float = 0.0, requests: int = 200, rate: float = 8.0) -> tuple[Ask, ...]:
    """Four of five answers are short, the fifth twenty times as long; expected with an error."""
    rng = np.random.default_rng(0)
    arrivals = np.cumsum(rng.exponential(1 / rate, requests))
    return tuple(_ask(f"r{i}", float(at), error, rng) for i, at in enumerate(arrivals))


def _ask(name: str, arrival_s: float, error: float, rng: np.random.Generator) -> Ask:
    low, high = (10, 40) if rng.random() < 0.8 else (200, 800)
    length = int(rng.integers(low, high))
    expected = float(np.clip(length * np.exp(error * rng.normal()), 1, 1_000))
    return Ask(name, arrival_s, int(rng.integers(20, 100)), length, expected)


@cache
def served(policy: str, error: float = 0.0) -> LoadResult:
    return Load(policy, list(bimodal(error)), MEMORY).run()


def normalised_s(policy: str, error: float = 0.0) -> float:
    """ALISE's measure: the mean of end-to-end time over output tokens."""
    ended_s = served(policy, error).ended_s
    return float(np.mean([(ended_s[a.name] - a.arrival_s) / a.length for a in bimodal(error)]))


@pytest.mark.parametrize("policy", list(presets()))
def test_all_requests_end(policy: str) -> None:
    asks = list(bimodal()[:80])
    assert set(Load(policy, asks, MEMORY).run().ended_s) == {ask.name for ask in asks}


def test_shortest_first_beats_first_come() -> None:
    assert normalised_s("alise") < 0.2 * normalised_s("fcfs")
    assert normalised_s("alise") < 0.7 * normalised_s("alise-defer")
    assert normalised_s("alise-defer") < 0.4 * normalised_s("fcfs")


OVERLOAD_S = 200.0


@cache
def overloaded(policy: str) -> LoadResult:
    return Load(policy, list(overload()), MEMORY).run()


@cache
def overload() -> tuple[Ask, ...]:
    """The requests of 200 s, at 1.5 times the capacity."""
    return tuple(ask for ask in bimodal(0.5, 1_500, 5.5) if ask.arrival_s < OVERLOAD_S)


@pytest.mark.slow
def test_overload_keeps_throughput_and_order() -> None:
    results = {policy: overloaded(policy) for policy in ("fcfs", "alise")}
    made = {policy: run.tokens_by(OVERLOAD_S) for policy, run in results.items()}
    assert sum(ask.length for ask in overload()) > 1.5 * made["fcfs"]
    assert made["alise"] >= 0.95 * made["fcfs"]
    took_s = {policy: max(run.ended_s.values()) for policy, run in results.items()}
    assert took_s["alise"] <= took_s["fcfs"] / 0.95
    norm_s = {
        policy: np.mean([(run.ended_s[a.name] - a.arrival_s) / a.length for a in overload()])
        for policy, run in results.items()
    }
    assert norm_s["alise"] <= norm_s["fcfs"] / 2


@pytest.mark.slow
def test_short_requests_stay_first_under_overload() -> None:
    """Also in the last third of the load, when many requests have waited longer than ageing
    takes."""
    results = overloaded("alise")
    late = [ask for ask in overload() if ask.arrival_s > OVERLOAD_S * 2 / 3]
    waited_s = {ask.name: results.ended_s[ask.name] - ask.arrival_s for ask in late}
    short = [waited_s[ask.name] for ask in late if ask.length < 100]
    long = [waited_s[ask.name] for ask in late if ask.length >= 100]
    assert np.mean(short) < 0.1 * np.mean(long)


def test_scheduler_tolerates_wrong_forecasts() -> None:
    assert normalised_s("alise", error=0.5) < 1.1 * normalised_s("alise")


@pytest.mark.parametrize("policy", ["alise", "alise-recompute"])
@pytest.mark.parametrize("error", [0.0, 0.5])
def test_no_thrash_after_preemption(policy: str, error: float) -> None:
    """Each pause admits another request, so there are fewer pauses than requests; and
    most requests are paused before memory runs out."""
    results = served(policy, error)
    assert 0 < sum(results.preemptions.values()) < 0.5 * len(bimodal())
    assert max(results.preemptions.values()) < 20
    assert results.evictions < served("fcfs", error).evictions


@pytest.mark.slow
@pytest.mark.parametrize(("ageing_s", "starves"), [(1.0, False), (1e6, True)])
def test_ageing_ends_starvation(ageing_s: float, starves: bool) -> None:
    """Short requests arrive at 4/3 of the capacity, after a long one. The long request waits no
    longer than ageing takes to bring it to the front."""
    long = Ask("long", 0.05, 50, 500, 500)
    short = [Ask(f"s{i}", i * 0.045, 50, 20, 20) for i in range(600)]
    results = Load("alise", [long, *short], 600, ageing_s=ageing_s, places=8).run()
    bound_s = (LEVELS + 1) * ageing_s
    assert (results.longest_away_s["long"] > 15) == starves
    assert starves or results.longest_away_s["long"] < bound_s


def test_every_timed_change_has_a_tick() -> None:
    """Without running requests there are no reports; the state names the time of the next round."""
    load = Load("alise", [Ask("a", 0.0, 50, 500, 500)], 600)
    results = load.run()
    assert results.ended_s["a"] > 0 and load.state.next_deadline() == float("inf")
