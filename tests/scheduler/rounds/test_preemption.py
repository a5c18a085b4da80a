"""Preemption under ALISE, as transcripts and hand-computed tables."""

from math import inf

import pytest

from services.core import (
    Completion,
    FinishReason,
    Grant,
    Pause,
    Plan,
    QueueOrder,
    RequestProgress,
    Residency,
)
from services.costs import KVCosts
from services.policies.preset import choose
from services.scheduler.core import events as ev
from tests.scheduler.rounds.alise_driver import Driver, G, about


def test_urgent_arrival_preempts() -> None:
    """`long` fills memory; `short` arrives and preempts it until it has ended."""
    d = Driver(memory=300)
    d.submit("long", 400, prompt=100)
    d.progress("long", 150, 1.0, prompt=100)
    d.plans.clear()
    d.submit("short", 20, 2.0, prompt=100)
    [plan] = d.plans
    assert plan == Plan(
        seq=3,
        admit=(Grant("short", 32),),
        pause=(Pause("long", Residency.KEEP),),
        victims=("short",),
        order=QueueOrder(("short", "long"), (0.0, about(0.2))),
        residency="swap_int8",
        costs=KVCosts(0.0, 0.001, 0.002),
    )
    assert (d.running, d.queued) == (["short"], ["long"])
    ledger, job = d.state.ledger, d.state.jobs["long"]
    assert (ledger.home(job), ledger.held(job), ledger.preemptions(job)) == ("w0", 250, 1)

    d.sent.clear()
    d.report(2.1, applied=2)
    assert d.sent == []  # the worker has not applied the pause yet
    d.report(2.2, applied=3)
    assert d.sent == [ev.Preempt(G, "long", 150)]
    d.report(3.0, finished=(Completion("short", 20, FinishReason.STOP),))
    assert d.running == ["long"]
    # Rounds after 0.1, 0.1 and 0.8 s, a mean of 0.0971 s: two intervals are 19 steps.
    assert d.plans[-1].admit == (Grant("long", 150 + 32 + 19),)
    assert not any(isinstance(sent, ev.Place) and sent.request_id == "long" for sent in d.sent)


def test_no_pause_while_memory_is_free() -> None:
    d = Driver(memory=1_000)
    d.submit("long", 400, prompt=100)
    d.progress("long", 150, 1.0, prompt=100)
    d.submit("short", 20, 2.0, prompt=100)
    assert d.running == ["long", "short"]


def test_no_pause_if_request_does_not_fit_afterwards() -> None:
    d = Driver(memory=1_000)
    d.submit("stays", 30, prompt=500)  # level 0, like the arriving request
    d.progress("stays", 1, 1.0, prompt=500)
    d.submit("long", 400, prompt=100)
    d.progress("long", 150, 1.0, prompt=100)
    d.submit("short", 20, 2.0, prompt=600)
    assert (d.running, d.queued) == (["stays", "long"], ["short"])


def test_minimal_pauses_least_urgent_first() -> None:
    d = Driver(memory=640)
    for at, name in enumerate("abc"):
        d.submit(name, 400 + 100 * at, prompt=200)
        d.progress(name, 1, 1.0, prompt=200)
    d.submit("x", 20, 2.0, prompt=150)
    assert d.plans[-1].pause == (Pause("c", Residency.KEEP),)
    assert (d.running, d.queued) == (["a", "b", "x"], ["c"])


def test_only_more_urgent_fitting_request_preempts() -> None:
    """`y` does not fit even without both running requests: it waits. `x` preempts one of them."""
    d = Driver(memory=640, hysteresis=inf)
    for at, name in enumerate("ab"):
        d.submit(name, 400 + 100 * at, prompt=300)
        d.progress(name, 1, 1.0, prompt=300)
    d.submit("y", 30, prompt=600)
    d.state.rounds.preset = choose("alise", {"base_s": 0.5, "watermark": d.watermark})
    d.submit("x", 20, prompt=100)
    assert (d.running, d.queued) == (["a", "x"], ["y", "b"])


def test_new_admission_is_not_paused() -> None:
    """Its prompt may not have arrived, and there is no KV to keep."""
    d = Driver(places=1)
    d.submit("long", 400)
    d.submit("short", 20, 1.0)
    assert d.running == ["long"]
    d.report(2.0, progress=(RequestProgress("long", 0, 10),))
    assert d.running == ["short"]


@pytest.mark.parametrize(
    ("running", "queued", "swapped"),
    [
        (400, 20, True),
        (110, 95, False),  # one level better, but not shorter by a quarter
        (125, 95, True),
        (200, 110, False),  # much shorter, but at the same level
        (20, 400, False),
    ],
)
def test_hysteresis_delays_preemption(running: int, queued: int, swapped: bool) -> None:
    d = Driver(places=1)
    d.submit("a", running)
    d.report(1.0, progress=(RequestProgress("a", 0, 10),))
    d.submit("b", queued, 1.0)
    assert d.running == (["b"] if swapped else ["a"])


def test_near_equal_requests_swap_at_most_once() -> None:
    """Two near-equal requests and one slot: only ageing to the front admits the second, and a
    request at the front is not preempted."""
    d = Driver(places=1, ageing_s=1)
    made = {"a": 0, "b": 0}
    d.submit("a", 500)
    d.submit("b", 498)
    for at in range(1, 998):
        [name] = d.running
        made[name] += 1
        now = at * 0.01
        if made[name] == {"a": 500, "b": 498}[name]:
            d.report(now, finished=(Completion(name, made[name], FinishReason.STOP),))
        elif made[name] % 16 == 1:
            d.progress(name, made[name], now)
        else:
            d.step(ev.Tick(), now)
    paused = [pause.request_id for plan in d.plans for pause in plan.pause]
    assert len(paused) <= 1
    assert made == {"a": 500, "b": 497}


def test_defer_frees_slots_but_not_memory() -> None:
    d = Driver("alise-defer", memory=300, places=2)
    d.submit("long", 400, prompt=100)
    d.progress("long", 150, 1.0, prompt=100)
    d.submit("short", 20, 2.0, prompt=100)
    assert (d.running, d.queued) == (["long"], ["short"])  # a slot is free, but no memory
    d.submit("tiny", 10, 3.0, prompt=40)
    assert (d.running, d.queued) == (["long", "tiny"], ["short"])
    d.progress("tiny", 1, 3.0, prompt=40)
    d.submit("tinier", 5, 4.0, prompt=5)  # memory is free, but no slot: `long` has it
    assert (d.running, d.queued) == (["tiny", "tinier"], ["short", "long"])
    d.report(5.0, finished=(Completion("tiny", 10, FinishReason.STOP),))
    assert (d.running, d.queued) == (["tinier", "long"], ["short"])


@pytest.mark.parametrize(("policy", "next_one"), [("alise", "short"), ("alise-defer", "long")])
def test_deferred_requests_keep_memory(policy: str, next_one: str) -> None:
    """`short` would precede `long`, but the paused `long` holds 250 tokens."""
    d = Driver(policy, memory=300, places=1)
    d.submit("long", 400, prompt=100)
    d.progress("long", 150, 1.0, prompt=100)
    d.submit("tiny", 10, 2.0, prompt=40)
    d.submit("short", 20, 3.0, prompt=100)
    assert (d.running, d.queued) == (["tiny"], ["short", "long"])
    d.report(4.0, finished=(Completion("tiny", 10, FinishReason.STOP),))
    assert d.running == [next_one]
