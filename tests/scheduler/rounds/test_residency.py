"""Paused KV: expected waits, homes, and reports that cross plans."""

from math import inf

from services.core import (
    Completion,
    FinishReason,
    Grant,
    Plan,
    QueueOrder,
    RequestProgress,
    WorkerView,
)
from services.scheduler.core import events as ev
from tests.scheduler.rounds.alise_driver import FRONT, Driver, G, about


def last_two(plan: Plan) -> list[tuple[str, float]]:
    return list(plan.order)[-2:]


def test_expected_waits_match_hand_computation() -> None:
    """Three requests run, two are paused, and one waits without KV. In order of remaining time: x
    0.1, y 0.3 | fresh 0.5 | p 0.6 | q 3 s; all before each add up, and ageing brings them to the
    front after 3 · 1 s."""
    d = Driver("alise", memory=10_000, places=5, ageing_s=1.0, levels=3, hysteresis=inf)
    for name, tokens in {"x": 10, "y": 30, "z": 500, "p": 60, "q": 300}.items():
        d.submit(name, tokens, 0.0)
    evicted = (RequestProgress("p", 0, 10), RequestProgress("q", 0, 10))
    d.state.workers["w0"].view = WorkerView("w0", "", "demo", 10_000, 16, 3, 5_000)
    runs = tuple(RequestProgress(name, 0, 10) for name in "xyz")
    d.report(0.0, progress=runs, evicted=evicted)
    d.submit("fresh", 50, 0.0)
    d.plans.clear()
    d.report(0.25, progress=(RequestProgress("z", 20, 30),))  # 480 remain; its slice continues
    assert d.queued == ["fresh", "p", "q"]
    [plan] = d.plans
    assert plan.extend == (Grant("z", 20 + 32 + 2),)  # 0.025 s from plan to plan, 0.03 s a step
    assert plan.order == QueueOrder(
        ("x", "y", "z", "p", "q"),
        (0.0, 0.0, 0.0, about(0.1 + 0.3 + 0.5), about(0.1 + 0.3 + 0.5 + 0.6)),
    )
    assert plan.victims == ("z", "y", "x")
    d.plans.clear()
    d.report(0.95, progress=(RequestProgress("z", 40, 50),))
    [plan] = d.plans
    assert last_two(plan) == [("p", about(0.9)), ("q", about(1.5))]
    for name in "xy":  # doubling its expected length puts it behind all these
        d.progress(name, 300, 1.0)
    d.plans.clear()
    d.report(2.9, progress=(RequestProgress("z", 60, 70),))
    assert last_two(d.plans[-1]) == [("p", about(0.1)), ("q", about(0.1))]
    d.plans.clear()
    d.report(
        3.1, progress=(RequestProgress("z", 90, 100),)
    )  # `p` is at this worker, and `q` follows it
    assert d.levels() | {"p": FRONT} == d.levels()
    assert last_two(d.plans[-1]) == [("p", 0.0), ("q", about(0.6 + 0.5))]


def test_paused_request_resumes_only_at_home() -> None:
    d = Driver(memory=300)
    d.submit("a", 400, prompt=100)
    d.progress("a", 100, 1.0, prompt=100)
    d.submit("b", 420, prompt=90)
    d.report(
        2.0, evicted=(RequestProgress("b", 8, 98),), progress=(RequestProgress("a", 150, 250),)
    )
    assert ev.Preempt(G, "b", 8) in d.sent
    d.attach("w1")
    d.report(3.0, on="w1")
    assert (d.running, d.queued) == (["a"], ["b"])  # w1 is free, but b's KV is at w0
    d.report(4.0, finished=(Completion("a", 200, FinishReason.STOP),))
    assert list(d.state.workers["w0"].running) == ["b"]
    # 0.1 · 1 s, then 0.9 · 0.1 + 0.1 · 1 s from plan to plan: two times 19 steps.
    assert d.plans[-1].admit == (Grant("b", 8 + 32 + 38),)


def test_request_without_kv_may_move() -> None:
    d = Driver(memory=300)
    d.submit("a", 400, prompt=100)
    d.progress("a", 150, 1.0, prompt=100)
    d.submit("b", 20, 2.0, prompt=100)
    assert d.queued == ["a"]
    d.attach("w1")
    d.sent.clear()
    d.report(3.0, applied=2, evicted=(RequestProgress("a", 152, 0),))
    assert list(d.state.workers["w1"].running) == ["a"]
    assert d.sent == [
        ev.Preempt(G, "a", 152),
        ev.Place(G, "a", "w1", "unix:/w1", about(1.0)),
    ]
    assert d.plans[-2].cancel == ("a",)


def test_progress_of_paused_request_is_applied() -> None:
    """Reports cross plans: the request ends, progresses, or is evicted before its worker applies
    the pause."""
    d = Driver(memory=300)
    d.submit("a", 400, prompt=100)
    d.progress("a", 150, 1.0, prompt=100)
    d.submit("b", 20, 2.0, prompt=100)
    d.report(2.1, applied=2, progress=(RequestProgress("a", 153, 253),))
    assert d.state.ledger.output(d.state.jobs["a"]) == 153
    d.report(2.2, applied=2, finished=(Completion("a", 154, FinishReason.STOP),))
    assert d.queued == [] and "a" not in d.state.jobs
    [finish] = [sent for sent in d.sent if isinstance(sent, ev.Finish)]
    assert (finish.request_id, finish.preemptions, finish.queued_s) == ("a", 1, about(0.2))


def test_outdated_eviction_is_ignored() -> None:
    d = Driver(memory=300)
    d.submit("a", 400, prompt=100)
    d.progress("a", 150, 1.0, prompt=100)
    d.submit("b", 20, 2.0, prompt=100)  # plan 3 pauses a
    d.step(ev.Cancelled(G, "b", FinishReason.CANCELLED, 0), 2.0)  # plan 4 resumes it
    assert d.running == ["a"]
    d.sent.clear()
    d.report(2.1, applied=2, evicted=(RequestProgress("a", 151, 0),))
    assert d.running == ["a"] and d.sent == []
    d.report(2.2, applied=d.plans[-1].seq, evicted=(RequestProgress("a", 151, 0),))
    assert d.state.ledger.preemptions(d.state.jobs["a"]) == 2 and ev.Preempt(G, "a", 151) in d.sent


def test_lost_worker_loses_paused_kv() -> None:
    d = Driver(memory=300)
    d.submit("a", 400, prompt=100)
    d.progress("a", 150, 1.0, prompt=100)
    d.submit("b", 20, 2.0, prompt=100)
    d.sent.clear()
    d.step(ev.WorkerLost("w0#1", "w0"), 3.0)
    assert d.sent == [ev.Preempt(G, "b", 0), ev.Preempt(G, "a", 150)]
    assert d.homes() == {"a": ("", 0), "b": ("", 0)}
    d.attach("w1", memory=1_000)
    assert sorted(d.running) == ["a", "b"]
