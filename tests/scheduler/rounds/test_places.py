"""Placement by the memory, speed, model and reported blocks of workers."""

from typing import Any

import pytest

from services.core import Report, Request, RequestProgress, WorkerView
from services.costs import CostModel
from services.forecast import certain
from services.policies.decision import MemoryShort
from services.scheduler.core import events as ev
from tests.scheduler.state_driver import (
    G,
    admitted,
    report,
    request,
    run_step,
    state,
    submitted,
    waits,
    why,
)

COST = CostModel(0.01, 1e-4, 1e-4, 0.0)


def attach(s: Any, name: str, kv_tokens: int, model: str = "demo", cost: CostModel = COST) -> None:
    view = WorkerView(name, f"unix:/{name}", model, kv_tokens, 16, 256, 4_096)
    run_step(s, ev.WorkerAttached(f"{name}#1", view), 0.0)
    s.step(ev.Costed(name, cost), 0.0)


def burst(s: Any, count: int, model: str = "demo", prompt: int = 100, most: int = 50) -> None:
    """Submit this many requests at once; returns the actions of one round."""
    names = [f"{model}{len(s.jobs) + i}" for i in range(count)]
    for name in names:
        s.step(ev.Submitted(G, Request(name, model, prompt, most, 0.0)), 0.0)
    run_step(s, ev.Forecasted(tuple((name, certain(most)) for name in names)), 0.0)


def running(s: Any) -> dict[str, int]:
    return {name: len(w.running) for name, w in s.workers.items()}


def test_equal_workers_share_burst() -> None:
    s = state()
    attach(s, "w0", 10_000)
    attach(s, "w1", 10_000)
    burst(s, 6)
    assert running(s) == {"w0": 3, "w1": 3}


def test_small_worker_gets_proportional_share() -> None:
    """5,000 tokens beside 100,000: a twentieth of the requests, although both are far from full."""
    s = state()
    attach(s, "small", 5_000)
    attach(s, "large", 100_000, cost=CostModel(0.01, 1e-4, 0.0, 0.0))
    s.step(ev.Costed("small", CostModel(0.01, 1e-4, 0.0, 0.0)), 0.0)
    burst(s, 210)
    counts = running(s)
    assert counts["small"] + counts["large"] == 210
    assert 8 <= counts["small"] <= 12


@pytest.mark.parametrize("slower", [2, 4])
def test_slow_worker_gets_proportional_share(slower: int) -> None:
    s = state()
    attach(s, "fast", 20_000)
    attach(s, "slow", 20_000, cost=CostModel(COST.base_s * slower, 1e-4, 1e-4 * slower, 0.0))
    burst(s, 60)
    counts = running(s)
    assert counts["slow"] == pytest.approx(60 / (1 + slower), abs=1)


def test_share_counts_running_requests() -> None:
    s = state()
    attach(s, "w0", 10_000)
    burst(s, 6)
    attach(s, "w1", 10_000)
    burst(s, 8)
    assert running(s) == {"w0": 7, "w1": 7}


def test_long_queue_of_one_model_does_not_starve_another() -> None:
    """Thousands of requests wait for `demo`, all before the one for `other`."""
    s = state(max_queue=3_000)
    attach(s, "w0", 1_024)
    attach(s, "w1", 1_024, model="other")
    burst(s, 3_000)
    waiting = s.ledger.waiting
    burst(s, 5, model="other")
    assert running(s)["w1"] == 5 and s.ledger.waiting == waiting


def test_full_queue_of_one_model_accepts_another() -> None:
    """A model below its share of the queue is accepted; the drain time of one model is not the
    other's wait."""
    s = state(max_queue=40)
    attach(s, "w0", 1_024)
    attach(s, "w1", 1_024, model="other")
    for _ in range(2):
        burst(s, 60, most=400)
    assert s.drain_s > 1

    def limits(model: str, deadline_s: float = float("inf")) -> str:
        asked = Request(f"{model}{len(s.jobs)}", model, 10, 50, 0.0, deadline_s=deadline_s)
        [action] = s.step(ev.Submitted(G, asked), 0.0)
        return "in" if isinstance(action, ev.AskForecast) else str(action.reject.reason)

    assert [limits("demo"), limits("other", 1.0)] == ["queue_full", "in"]
    assert [limits("other") for _ in range(21)] == ["in"] * 19 + ["queue_full"] * 2


def test_long_request_waits_for_large_worker_without_blocking_others() -> None:
    s = state()
    attach(s, "small", 512)
    attach(s, "large", 2_048)
    submitted(s, request("first", prompt=1_500, most=400))
    submitted(s, request("second", prompt=1_400, most=400))
    assert list(s.workers["large"].running) == ["first"]
    assert "second" not in s.workers["small"].running
    submitted(s, request("short", prompt=100))
    assert list(s.workers["small"].running) == ["short"]


# Blocks


def test_memory_is_counted_in_whole_blocks() -> None:
    """17 tokens are two blocks: 95 % of six blocks may be planned, so two requests fit, not
    five."""
    s = state()
    attach(s, "w0", 96)
    for name in "ab":
        admitted(s, request(name, prompt=17))
    waits(s, request("c", prompt=17))
    assert why(s, "c") == MemoryShort(96, 0.95 * 96)


def test_shared_blocks_are_counted_once() -> None:
    """Two requests share six of nine prompt blocks: only with sharing does a third fit."""
    s = state()
    attach(s, "w0", 320)
    for name in "ab":
        admitted(s, request(name, prompt=130))
    waits(s, request("c", prompt=90))
    here = tuple(RequestProgress(name, 1, 131, 9) for name in "ab")
    report(s, 1, 1.0, progress=here, free_blocks=2)
    assert "c" not in s.workers["w0"].running
    report(s, 2, 2.0, free_blocks=8, shared_blocks=6)
    assert "c" in s.workers["w0"].running


def test_held_blocks_beyond_tokens_are_counted() -> None:
    """Reported blocks count, although the request has not filled them."""
    s = state()
    attach(s, "w0", 160)
    admitted(s, request("a"))
    report(s, 1, 1.0, progress=(RequestProgress("a", 1, 11, 7),), free_blocks=3)
    waits(s, request("b", prompt=40), 1.0)
    assert why(s, "b").needed_tokens == 7 * 16 + 3 * 16
    report(s, 2, 2.0, progress=(RequestProgress("a", 2, 12, 1),), free_blocks=9)
    assert "b" in s.workers["w0"].running


def test_usage_is_as_reported() -> None:
    s = state()
    attach(s, "w0", 160)
    admitted(s, request("a"))
    assert [w.held_tokens for w in s.fleet().workers] == [0]
    report(s, 1, 1.0, progress=(RequestProgress("a", 1, 11, 7),), free_blocks=3)
    assert [w.held_tokens for w in s.fleet().workers] == [7 * 16]
    s.step(
        ev.Reported("w0#1", "w0", Report(1, 0, free_blocks=9)), 1.5
    )  # a repeated report is ignored
    assert [w.held_tokens for w in s.fleet().workers] == [7 * 16]
    s.step(ev.WorkerLost("w0#1", "w0"), 2.0)
    assert s.fleet().workers == ()
