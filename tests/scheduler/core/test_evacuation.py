"""Evacuation of a draining worker: nothing is placed there, its requests move to the others."""

from dataclasses import replace
from typing import Any

import pytest

from services.core import (
    Completion,
    FinishReason,
    Grant,
    HeldRequest,
    Pause,
    Plan,
    Report,
    Request,
    RequestProgress,
    Residency,
    WorkerView,
)
from services.policies.preset import presets
from services.scheduler.core import events as ev
from tests.scheduler.state_driver import (
    G,
    admitted,
    queued,
    request,
    run_step,
    state,
    submitted,
    worker,
)


def drain(s: Any, now: float, name: str = "w0", link: str = "#1") -> Any:
    return run_step(s, ev.WorkerDraining(name + link, name, 30.0), now)


def plans(actions: Any) -> dict[str, Plan]:
    return {a.worker_id: a.plan for a in actions if isinstance(a, ev.SendPlan)}


def reported(s: Any, applied: int, now: float, seq: int = 1, **what: Any) -> Any:
    return run_step(s, ev.Reported("w0#1", "w0", Report(seq, applied, **what)), now)


def two(policy: str = "fcfs") -> Any:
    s = state(policy)
    run_step(s, worker("w0"), 0.0)
    admitted(s, request("a"))
    run_step(s, worker("w1"), 0.1)
    return s


def test_evacuated_request_starts_elsewhere_after_worker_confirms_stop() -> None:
    s = two()
    asked = drain(s, 1.0)
    assert asked == [ev.SendPlan("w0", "w0#1", plans(asked)["w0"])]
    assert plans(asked)["w0"].pause == (Pause("a", Residency.DROP),)
    assert queued(s) == ["a"]
    assert (
        plans(run_step(s, ev.Tick(), 1.1)) == {}
    )  # not started elsewhere while it may still end there
    stopped = reported(s, 2, 1.2, progress=(RequestProgress("a", 7, 0, 0),))
    assert [type(action) for action in stopped[:2]] == [ev.Preempt, ev.Place]
    assert stopped[0].output_tokens == 7
    assert stopped[1].worker_id == "w1"
    assert plans(stopped)["w0"].cancel == ("a",)
    assert plans(stopped)["w1"].admit == (Grant("a", 50),)


def test_request_that_ends_before_pause_is_finished() -> None:
    s = two()
    drain(s, 1.0)
    ended = reported(s, 1, 1.1, finished=(Completion("a", 50, FinishReason.LENGTH),))
    assert [type(action) for action in ended] == [ev.Learn, ev.Finish]
    assert not s.jobs


def test_draining_worker_receives_no_requests() -> None:
    s = two()
    drain(s, 1.0)
    placed = [submitted(s, request(f"b{n}"), 1.1 + n) for n in range(5)]
    found = {a.worker_id for actions in placed for a in actions if isinstance(a, ev.Place)}
    assert found == {"w1"}


def test_request_no_other_worker_can_run_continues() -> None:
    """The request has a grant for all its tokens, so that no round considers it."""
    s = state("scls")  # slices
    run_step(s, worker("w0"), 0.0)
    admitted(s, request("a", most=400))
    limit = int(s.ledger.board.jobs.limit[s.jobs["a"].row])
    assert limit < 400
    assert plans(drain(s, 1.0))["w0"].extend == (Grant("a", 400),)
    assert plans(run_step(s, ev.Tick(), 1.1)) == {}
    assert list(s.workers["w0"].running) == ["a"]
    waits = submitted(s, request("b"), 1.2)
    assert plans(waits) == {} and queued(s) == ["b"]
    handed = plans(run_step(s, worker("w1"), 2.0))
    assert handed["w0"].pause == (Pause("a", Residency.DROP),)
    assert [grant.request_id for grant in handed["w1"].admit] == ["b"]


def test_evacuation_ignores_other_models_and_small_workers() -> None:
    s = state()
    run_step(s, worker("w0"), 0.0)
    admitted(s, request("a"))
    run_step(s, ev.WorkerAttached("w1#1", WorkerView("w1", "w1", "other", 1_000, 16, 8, 500)), 0.1)
    run_step(s, ev.WorkerAttached("w2#1", WorkerView("w2", "w2", "demo", 1_000, 16, 8, 59)), 0.1)
    assert plans(drain(s, 1.0)) == {}
    assert list(s.workers["w0"].running) == ["a"]


def test_paused_request_leaves_draining_worker_without_kv() -> None:
    """Whether memory or a round stopped the request."""
    s = state()
    run_step(s, worker("w0"), 0.0)
    admitted(s, request("a"))
    s.step(ev.Reported("w0#1", "w0", Report(1, 1, evicted=(RequestProgress("a", 20, 30, 0),))), 0.5)
    s.step(worker("w1"), 0.5)
    handed = drain(s, 1.0)
    assert plans(handed)["w0"].cancel == ("a",)
    assert plans(handed)["w1"].admit == (Grant("a", 50),)
    [placed] = [action for action in handed if isinstance(action, ev.Place)]
    assert (placed.request_id, placed.worker_id) == ("a", "w1")


def test_request_adopted_at_draining_worker_is_moved() -> None:
    s = state()
    view = WorkerView("w0", "unix:/w0", "demo", 1_000, 16, 8, 500)
    held = HeldRequest("a", 10, 50, 20, 30, 50, True, 2)
    run_step(s, ev.WorkerAttached("w0#1", view, (held,)), 0.0)
    run_step(s, worker("w1"), 0.1)
    drain(s, 0.2)
    again = Request("a", "demo", 10, 50, 0.0, delivered_tokens=18, worker_id="w0")
    assert plans(run_step(s, ev.Submitted(G, again), 0.3))["w0"].pause == (
        Pause("a", Residency.DROP),
    )


def test_plan_names_adopted_requests_of_a_draining_worker_as_victims() -> None:
    """No other worker could run them, and no round has decided about them; limits below their caps
    are raised."""
    s = state()
    view = WorkerView("w0", "unix:/w0", "demo", 1_000, 16, 8, 500)
    held = tuple(HeldRequest(name, 10, 50, 20, 30, 30, True, 2) for name in "ab")
    run_step(s, ev.WorkerAttached("w0#1", view, held), 0.0)
    drain(s, 0.2)
    s.step(ev.Submitted(G, replace(request("a"), worker_id="w0")), 0.3)
    actions = run_step(s, ev.Submitted(G, replace(request("b"), worker_id="w0")), 0.3)
    plan = plans(actions)["w0"]
    assert set(plan.extend) == {Grant("a", 50), Grant("b", 50)}
    assert plan.victims == ("b", "a")


def test_reattached_worker_is_no_longer_draining() -> None:
    s = two()
    drain(s, 1.0)
    run_step(s, ev.WorkerLost("w0#1", "w0"), 1.1)
    run_step(s, worker("w0", link="#2"), 1.2)
    assert drain(s, 1.3) == []  # from the stream that has ended
    assert not s.workers["w0"].draining and len(s.ledger.worker_snapshots()) == 2


@pytest.mark.parametrize("policy", sorted(presets()))
def test_evacuation_finishes_all_requests_under_every_preset(policy: str) -> None:
    s = two(policy)
    for n in range(3):
        submitted(s, request(f"b{n}"), 0.2)
    now, applied, seq = 1.0, 0, 0
    out = drain(s, now)
    for _ in range(20):
        if "w0" in (sent := plans(out)):
            applied = sent["w0"].seq
        now, seq = now + 5.0, seq + 1
        out = reported(s, applied or s.workers["w0"].plan_seq, now, seq)
        if s.round_due_s < float("inf"):
            out += s.step(ev.Round(), max(now, s.round_due_s))
            now = max(now, s.round_due_s if s.round_due_s < float("inf") else now)
    assert not s.workers["w0"].running
    assert set(s.workers["w1"].running) | set(queued(s)) == {"a", "b0", "b1", "b2"}
    assert s.workers["w1"].running


def test_request_finished_before_extend_is_applied_is_forgotten() -> None:
    """A worker holds an admission without a prompt for a minute, and drains for as long."""
    s = state()
    run_step(s, worker("w0"), 0.0)
    admitted(s, request("a"))
    reported(s, 1, 0.5, evicted=(RequestProgress("a", 20, 30, 0),))  # admitted again, by plan 2
    assert s.workers["w0"].plan_seq == 2
    ended = reported(s, 1, 0.6, 2, finished=(Completion("a", 30, FinishReason.STOP),))
    assert plans(ended)["w0"].cancel == ("a",)
    admitted(s, request("b"), 1.0)
    ended = reported(s, 4, 1.6, 3, finished=(Completion("b", 30, FinishReason.STOP),))
    assert plans(ended) == {}
