"""The scheduler's core as transcripts: what happened, and everything it asked for."""

from math import inf
from typing import Any

import pytest

from services.core import (
    Completion,
    FinishReason,
    Grant,
    Outcome,
    Plan,
    Progress,
    Reject,
    RejectReason,
    Report,
    Request,
    WorkerView,
)
from services.forecast import Forecast, certain, from_lengths
from services.policies.preset import choose
from services.scheduler import events as ev
from services.scheduler.ledger import Limits
from services.scheduler.state import SchedulerState

G = "gateway#1"


def worker(name: str = "w0", kv_tokens: int = 1_000) -> ev.WorkerAttached:
    view = WorkerView(name, f"unix:/{name}", "demo", kv_tokens, 16, 8, 500)
    return ev.WorkerAttached(f"{name}#1", view)


def request(name: str, prompt: int = 10, most: int = 50, at: float = 0.0, deadline: float = inf):
    return Request(name, "demo", prompt, most, at, deadline_s=deadline)


def state(policy: str = "fcfs", **limits: int) -> Any:
    """Untyped, so that a transcript may say what each action must be by comparing it."""
    return SchedulerState(choose(policy), Limits(**limits))


def submitted(s: Any, asked: Request, now: float = 0.0) -> Any:
    """Submit and forecast at once; the actions of the second step."""
    s.step(ev.Submitted(G, asked), now)
    return s.step(ev.Forecasted(((asked.request_id, certain(asked.max_tokens)),)), now)


def admitted(s: Any, asked: Request, now: float = 0.0, on: str = "w0") -> None:
    actions = submitted(s, asked, now)
    [problem] = [a for a in actions if isinstance(a, ev.AskBatch)]
    s.step(ev.Formed(problem.round, (ev.Batch(on, 1),)), now)
    assert asked.request_id in s.workers[on].running


def report(s: Any, seq: int, now: float, on: str = "w0", **what: Any) -> Any:
    return s.step(ev.Reported(f"{on}#1", on, Report(seq, 0, **what)), now)


def test_a_request_from_arrival_to_its_outcome():
    s = state()
    a = request("a")
    assert s.step(worker(), 0.0) == []
    assert s.step(ev.Submitted(G, a), 1.0) == [ev.AskForecast((a,))]
    forecast = certain(50)
    assert s.step(ev.Forecasted((("a", forecast),)), 1.5) == [
        ev.AskBatch(
            1,
            "aggressive",
            {"watermark": 0.95},
            (forecast,),
            (ev.Group("w0", 1_000, 8, ev.Columns(), ev.Columns((10,), (0,), (50,), (0,))),),
        )
    ]
    assert s.step(ev.Formed(1, (ev.Batch("w0", 1),)), 2.0) == [
        ev.Place(G, "a", "w0", "unix:/w0", queued_s=1.0),
        ev.SendPlan("w0", "w0#1", Plan(1, admit=(Grant("a", 50),), victims=("a",))),
    ]
    assert report(s, 1, 3.0, progress=(Progress("a", 16, 26),)) == []
    assert report(s, 2, 4.0, finished=(Completion("a", 30, FinishReason.STOP),)) == [
        ev.Learn(Outcome("a", "demo", "", 10, 30, 50, FinishReason.STOP, 4.0, 0)),
        ev.Finish(G, "a", FinishReason.STOP, 30, 0, 1.0),
    ]
    assert not s.jobs and not s.workers["w0"].running


def test_a_report_applied_twice_changes_nothing():
    s = state()
    s.step(worker(), 0.0)
    admitted(s, request("a"))
    done: Any = {"finished": (Completion("a", 30, FinishReason.STOP),)}
    assert len(report(s, 1, 1.0, **done)) == 2
    assert report(s, 1, 1.0, **done) == []


def test_requests_that_arrive_during_a_round_wait_for_the_next():
    s = state()
    s.step(worker(), 0.0)
    [first] = submitted(s, request("a"))
    assert submitted(s, request("b", at=1.0), 1.0) == []
    actions = s.step(ev.Formed(first.round, (ev.Batch("w0", 1),)), 2.0)
    [problem] = [a for a in actions if isinstance(a, ev.AskBatch)]
    [group] = problem.groups
    assert (group.running.prompt_tokens, group.queued.prompt_tokens) == ((10,), (10,))
    assert problem.round == 2


def test_what_waits_is_asked_again_only_after_an_event():
    s = state()
    s.step(worker(), 0.0)
    [problem] = submitted(s, request("a"))
    assert s.step(ev.Formed(problem.round, (ev.Batch("w0", 0, 0, "memory"),)), 1.0) == []
    assert s.step(ev.Tick(), 2.0) == []
    [again] = report(s, 1, 3.0)
    assert isinstance(again, ev.AskBatch) and again.round == 2


def test_a_failed_round_is_asked_again_at_once():
    s = state()
    s.step(worker(), 0.0)
    [problem] = submitted(s, request("a"))
    [again] = s.step(ev.Formed(problem.round, ()), 1.0)
    assert isinstance(again, ev.AskBatch) and again.round == problem.round + 1


def test_an_evicted_request_goes_in_front_and_returns_without_a_new_place():
    s = state()
    s.step(worker(), 0.0)
    admitted(s, request("a"))
    admitted(s, request("b", at=1.0), 1.0)
    submitted(s, request("c", at=2.0), 2.0)
    s.step(ev.Formed(3, (ev.Batch("w0", 0),)), 2.0)
    actions = report(s, 1, 3.0, evicted=(Progress("b", 20, 0),))
    assert actions[0] == ev.Preempt(G, "b", 20)
    assert [job.request_id for job in s.ledger.queue] == ["b", "c"]
    problem = actions[1]
    assert isinstance(problem, ev.AskBatch)
    assert problem.groups[0].queued.output_tokens == (20, 0)
    plan = Plan(3, admit=(Grant("b", 50),), victims=("b", "a"))
    assert s.step(ev.Formed(problem.round, (ev.Batch("w0", 1),)), 4.0)[:2] == [
        ev.Resume(G, "b", held_tokens=0),
        ev.SendPlan("w0", "w0#1", plan),
    ]


def test_an_evicted_request_may_move_and_its_old_worker_forgets_it():
    s = state()
    s.step(worker(), 0.0)
    admitted(s, request("a"))
    admitted(s, request("b"))
    s.step(worker("w1"), 1.0)
    _, problem = report(s, 1, 2.0, evicted=(Progress("a", 20, 0),))
    assert [group.worker_id for group in problem.groups] == ["w1"]
    assert s.step(ev.Formed(problem.round, (ev.Batch("w1", 1),)), 3.0) == [
        ev.Place(G, "a", "w1", "unix:/w1", queued_s=1.0),
        ev.SendPlan("w0", "w0#1", Plan(3, cancel=("a",), victims=("b",))),
        ev.SendPlan("w1", "w1#1", Plan(1, admit=(Grant("a", 50),), victims=("a",))),
    ]


def test_slices_are_extended_before_they_run_out():
    preset = choose("fcfs", {"slice_tokens": "20"})
    s: Any = SchedulerState(preset)
    s.step(worker(), 0.0)
    admitted(s, request("a"))
    assert s.jobs["a"].limit_tokens == 20
    assert report(s, 1, 1.0, progress=(Progress("a", 9, 19),)) == []
    [plan] = report(s, 2, 2.0, progress=(Progress("a", 12, 22),))
    assert plan.plan == Plan(2, extend=(Grant("a", 32),), victims=("a",))
    [plan] = report(s, 3, 3.0, progress=(Progress("a", 32, 42),))
    assert plan.plan.extend == (Grant("a", 50),)
    assert report(s, 4, 4.0, progress=(Progress("a", 49, 59),)) == []


@pytest.mark.parametrize("policy", ["fcfs", "conservative", "past-future"])
def test_a_whole_grant_is_never_extended(policy: str):
    s = state(policy)
    s.step(worker(), 0.0)
    admitted(s, request("a"))
    assert report(s, 1, 1.0, progress=(Progress("a", 49, 59),)) == []


def test_cancelling_at_every_stage_leaves_nothing():
    s = state()
    s.step(worker(), 0.0)
    cancel = ev.Cancelled(G, "a", FinishReason.CANCELLED, 0)
    s.step(ev.Submitted(G, request("a")), 0.0)
    assert s.step(cancel, 0.0) == []  # while forecast
    assert s.step(ev.Forecasted((("a", certain(50)),)), 0.0) == []
    [problem] = submitted(s, request("a"))
    assert s.step(cancel, 0.0) == []  # while offered
    assert s.step(ev.Formed(problem.round, (ev.Batch("w0", 1),)), 0.0) == []
    admitted(s, request("a"))
    assert s.step(cancel, 0.0) == [ev.SendPlan("w0", "w0#1", Plan(2, cancel=("a",)))]  # running
    admitted(s, request("a"))
    report(s, 1, 1.0, evicted=(Progress("a", 4, 0),))
    [plan] = s.step(cancel, 1.0)  # evicted, its tokens still at the worker
    assert plan.plan.cancel == ("a",)
    assert not s.jobs and not s.ledger.queue and not s.workers["w0"].running


def test_another_gateway_cannot_cancel_it():
    s = state()
    s.step(worker(), 0.0)
    admitted(s, request("a"))
    assert s.step(ev.Cancelled("other#1", "a", FinishReason.CANCELLED, 0), 0.0) == []
    assert "a" in s.jobs


def test_a_stop_string_is_an_outcome_to_learn_from():
    s = state()
    s.step(worker(), 0.0)
    admitted(s, request("a"))
    learn, plan = s.step(ev.Cancelled(G, "a", FinishReason.STOP, 7), 2.0)
    assert learn.outcome.output_tokens == 7 and learn.outcome.reason is FinishReason.STOP
    assert plan.plan.cancel == ("a",)


def test_a_lost_gateway_takes_its_requests_with_it():
    s = state()
    s.step(worker(), 0.0)
    admitted(s, request("a"))
    submitted(s, request("b"))
    [plan] = s.step(ev.GatewayLost(G), 1.0)
    assert plan.plan == Plan(2, cancel=("a",))
    assert not s.jobs and not s.ledger.queue


def test_a_resubmission_on_a_new_stream_replaces_the_old_one():
    s = state()
    s.step(worker(), 0.0)
    admitted(s, request("a"))
    again = Request("a", "demo", 10, 50, 0.0, delivered_tokens=5)
    ask, plan = s.step(ev.Submitted("gateway#2", again), 1.0)
    assert ask == ev.AskForecast((again,)) and plan.plan.cancel == ("a",)
    assert s.step(ev.GatewayLost(G), 1.0) == []
    assert s.jobs["a"].output_tokens == 5


def test_a_lost_worker_gives_its_requests_back_in_front():
    s = state()
    s.step(worker(), 0.0)
    admitted(s, request("a"))
    report(s, 1, 1.0, progress=(Progress("a", 9, 19),))
    assert s.step(ev.WorkerLost("w0#1", "w0"), 2.0) == [ev.Preempt(G, "a", 9)]
    [problem] = s.step(worker("w1"), 3.0)
    place, _ = s.step(ev.Formed(problem.round, (ev.Batch("w1", 1),)), 4.0)
    assert place == ev.Place(G, "a", "w1", "unix:/w1", queued_s=2.0)


def test_the_end_of_an_old_stream_does_not_unseat_a_worker_that_came_back():
    s = state()
    s.step(worker(), 0.0)
    admitted(s, request("a"))
    view = worker().view
    preempt, problem = s.step(ev.WorkerAttached("w0#2", view), 1.0)
    assert preempt == ev.Preempt(G, "a", 0) and isinstance(problem, ev.AskBatch)
    assert s.step(ev.WorkerLost("w0#1", "w0"), 2.0) == []
    assert "w0" in s.workers


def test_a_deadline_ends_the_waiting_and_the_running():
    s = state()
    s.step(worker(), 0.0)
    admitted(s, request("a", deadline=5.0))
    s.step(ev.Submitted(G, request("b", at=1.0, deadline=4.0)), 1.0)
    assert s.next_deadline() == 4.0
    assert s.step(ev.Tick(), 3.9) == []
    assert s.step(ev.Tick(), 4.0) == [
        ev.Finish(G, "b", FinishReason.DEADLINE, 0, 0, 3.0, "the deadline passed")
    ]
    finish, plan = s.step(ev.Tick(), 5.0)
    assert finish.reason is FinishReason.DEADLINE and plan.plan.cancel == ("a",)
    assert s.next_deadline() == inf


def test_no_is_said_with_its_reason():
    s = state(max_queue=1)
    too_long = s.step(ev.Submitted(G, request("long", prompt=400, most=200)), 0.0)
    assert isinstance(too_long[0], ev.AskForecast)  # no worker yet: it may fit one to come
    [refused] = s.step(worker(), 0.0)
    assert refused.reject == Reject(
        RejectReason.TOO_LONG,
        "prompt (400) + max_tokens (200) = 600 tokens, "
        "but the longest request that fits here is 500 tokens",
    )
    submitted(s, request("a"))
    [refused] = s.step(ev.Submitted(G, request("a")), 0.0)
    assert refused.reject.reason is RejectReason.DUPLICATE
    [refused] = s.step(ev.Submitted(G, request("b")), 0.0)
    assert refused.reject.reason is RejectReason.QUEUE_FULL
    assert refused.reject.retry_after_s >= 1.0
    s.step(ev.Draining(), 0.0)
    [refused] = s.step(ev.Submitted(G, request("c")), 0.0)
    assert refused.reject.reason is RejectReason.DRAINING


def test_a_refresh_reaches_every_request_of_the_population():
    s = state("past-future")
    old = Forecast((50.0,), (1.0,), 50, "history", 1, "history/demo")
    s.step(ev.Submitted(G, request("a")), 0.0)
    s.step(ev.Submitted(G, request("b")), 0.0)
    s.step(ev.Forecasted((("a", old), ("b", certain(50)))), 0.0)
    assert [r.request_id for r in s.shared_representatives()] == ["a"]
    new = from_lengths([5, 9], 9, "history", 2, "history/demo")
    s.step(ev.Refreshed((new,)), 1.0)
    assert s.jobs["a"].forecast == new and s.jobs["b"].forecast == certain(50)


def test_two_workers_share_a_burst():
    s = state()
    s.step(worker("w0"), 0.0)
    s.step(worker("w1"), 0.0)
    names = [f"r{i}" for i in range(6)]
    for name in names:
        s.step(ev.Submitted(G, request(name)), 0.0)
    [problem] = s.step(ev.Forecasted(tuple((name, certain(50)) for name in names)), 0.0)
    assert [(g.worker_id, len(g.queued.prompt_tokens)) for g in problem.groups] == [
        ("w0", 3),
        ("w1", 3),
    ]


def test_drain_time_counts_what_is_ahead_over_the_rate():
    s = state()
    assert s.ledger.fleet().drain_s == 1.0
    s.step(worker(), 0.0)
    for name in "abcdefgh":
        admitted(s, request(name, most=400))
    for i in range(100):
        submitted(s, request(f"q{i}", most=400))
    cost = s.workers["w0"].cost
    rate = 8 / cost.step_s(0, 8, 80)
    assert s.ledger.fleet().drain_s == pytest.approx(108 * 400 / rate)
