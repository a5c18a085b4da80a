"""Static batches in the scheduler: their members and their timing."""

from typing import Any

from services.core import (
    Completion,
    FinishReason,
    Grant,
    Plan,
    RequestProgress,
    StaticBatch,
    WorkerView,
)
from services.costs import BatchTiming
from services.forecast import certain
from services.policies.preset import choose
from services.scheduler.core import events as ev
from services.scheduler.core.state import SchedulerState
from tests.scheduler.state_driver import G, report, request, run_step, worker


def static(batch_size: int = 3, **cells: Any) -> Any:
    """A state with static batches, slices of 10 tokens, and a worker."""
    given = {"batch_mode": "static", "slice": "turns", "slice_tokens": 10}
    preset = choose("vs", given | {"batch_size": batch_size} | cells)
    s: Any = SchedulerState(preset)
    run_step(s, worker(), 0.0)
    return s


def submitted(s: Any, *asked: Any, now: float = 0.0) -> Any:
    for each in asked:
        s.step(ev.Submitted(G, each), now)
    return run_step(
        s, ev.Forecasted(tuple((r.request_id, certain(r.max_tokens)) for r in asked)), now
    )


def plan_of(actions: Any) -> Plan:
    [plan] = [action.plan for action in actions if isinstance(action, ev.SendPlan)]
    assert isinstance(plan, Plan)
    return plan


def timed(actions: Any) -> list[BatchTiming]:
    return [action.timing for action in actions if isinstance(action, ev.Timed)]


def made(**outputs: int) -> tuple[RequestProgress, ...]:
    return tuple(RequestProgress(name, tokens, tokens) for name, tokens in outputs.items())


def ended(name: str, tokens: int, reason: FinishReason = FinishReason.STOP) -> Completion:
    return Completion(name, tokens, reason)


def test_requests_admitted_together_are_one_timed_batch():
    """Prompts of 10, 30 and 20; `b` ends with 4 tokens, the others generate all 10."""
    s = static()
    shapes = {"a": 10, "b": 30, "c": 20}
    plan = plan_of(submitted(s, *(request(name, length) for name, length in shapes.items())))
    assert plan.admit == (Grant("a", 10), Grant("b", 10), Grant("c", 10))
    assert plan.batches == (StaticBatch(1, ("a", "b", "c")),)
    assert timed(report(s, 1, 2.0, progress=made(a=5, c=5))) == []
    over = report(s, 2, 3.5, progress=made(a=10, c=10), finished=(ended("b", 4),))
    assert timed(over) == [BatchTiming(3, 30, 10, 3.5)]


def test_next_turn_is_new_batch_with_longer_contexts():
    """After the first batch, `a` has 10 + 10 tokens and `b` 5 + 10: padded to 20."""
    s = static()
    submitted(s, request("a"), request("b", 5))
    stops = plan_of(report(s, 1, 1.0, progress=made(a=10, b=10)))
    assert stops.admit == () and [pause.request_id for pause in stops.pause] == ["a", "b"]
    assert 1.0 < s.next_deadline() < 1.001  # both are back in the pool
    plan = plan_of(run_step(s, ev.Tick(), 1.5))
    assert plan.admit == (Grant("a", 20), Grant("b", 20))
    assert plan.batches == (StaticBatch(2, ("a", "b")),)
    over = report(s, 2, 4.5, progress=made(b=20), finished=(ended("a", 17),))
    assert timed(over) == [BatchTiming(2, 20, 10, 3.0)]


def test_member_of_running_batch_joins_no_other():
    s = static()
    submitted(s, request("a"), request("b"))
    actions = run_step(s, ev.Cancelled(G, "b", FinishReason.CANCELLED, 3), 1.0)
    assert plan_of(actions) == Plan(2, cancel=("b",), victims=("a",))
    over = report(s, 1, 2.0, finished=(ended("a", 7),))
    assert timed(over) == [BatchTiming(2, 10, 7, 2.0)], "as it was admitted"


def test_cancelled_member_is_not_in_plan():
    s = static()
    s.step(worker("w1"), 0.0)
    batch = StaticBatch(1, ("a", "b"))
    draft = s.workers["w1"].draft
    draft.admit += [Grant("a", 9), Grant("b", 9)]
    draft.batches.append(batch)
    draft.forget("a")
    assert draft.admit == [Grant("b", 9)] and draft.batches == [StaticBatch(1, ("b",))]
    draft.forget("b")
    [plan] = [sent.plan for sent in s.rounds.pop_plans() if sent.worker_id == "w1"]
    assert plan == Plan(1, cancel=("a", "b"))


def test_interrupted_batch_is_not_timed():
    s = static()
    submitted(s, request("a"), request("b"))
    report(s, 1, 1.0, evicted=made(b=3))
    assert timed(report(s, 2, 2.0, finished=(ended("a", 9),))) == []
    s = static()
    submitted(s, request("a"), request("b"))
    error = ended("b", 3, FinishReason.ERROR)
    assert timed(report(s, 1, 2.0, finished=(ended("a", 9), error))) == []
    s = static()
    submitted(s, request("a"))
    run_step(s, ev.Cancelled(G, "a", FinishReason.CANCELLED, 0), 1.0)
    assert timed(report(s, 1, 2.0)) == []
    assert s.workers["w0"].served == []


def test_continuous_batches_are_not_timed():
    s = static(batch_mode="continuous")
    assert plan_of(submitted(s, request("a"), request("b"))).batches == ()
    assert timed(report(s, 1, 2.0, finished=(ended("a", 9), ended("b", 9)))) == []


def test_each_worker_has_its_own_batches():
    s = static(batch_size=1)
    view = WorkerView("w1", "unix:/w1", "demo", 1_000, 16, 8, 500)
    run_step(s, ev.WorkerAttached("w1#1", view), 0.0)
    actions = submitted(s, request("a"), request("b", 20))
    plans = {a.worker_id: a.plan.batches for a in actions if isinstance(a, ev.SendPlan)}
    assert sorted(plans.values(), key=str) == [(StaticBatch(1, ("a",)),), (StaticBatch(2, ("b",)),)]
    over = report(s, 1, 2.0, on="w1", finished=(ended("b", 5), ended("a", 5)))
    assert len(timed(over)) == 1, "what the other has is not heard of from here"
