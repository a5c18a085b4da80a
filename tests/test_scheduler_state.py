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
from services.policies.decision import Reason
from services.policies.preset import choose
from services.scheduler import events as ev
from services.scheduler.board import Phase
from services.scheduler.door import Limits
from services.scheduler.state import SchedulerState

G = "gateway#1"


def worker(name: str = "w0", kv_tokens: int = 1_000, link: str = "#1") -> ev.WorkerAttached:
    view = WorkerView(name, f"unix:/{name}", "demo", kv_tokens, 16, 8, 500)
    return ev.WorkerAttached(name + link, view)


def request(name: str, prompt: int = 10, most: int = 50, at: float = 0.0, deadline: float = inf):
    return Request(name, "demo", prompt, most, at, deadline_s=deadline)


def state(policy: str = "fcfs", apart: bool = False, **limits: Any) -> Any:
    """Untyped, so that a transcript may say what each action must be by comparing it."""
    return SchedulerState(choose(policy), Limits(**limits), apart)


def told(s: Any, event: ev.Event, now: float) -> Any:
    """A step, and the round that it calls for; the actions of both."""
    actions = s.step(event, now)
    return actions + s.step(ev.Round(), now) if s.round_due_s <= now else actions


def submitted(s: Any, asked: Request, now: float = 0.0) -> Any:
    """Submit and forecast at once; the actions of the second step and its round."""
    s.step(ev.Submitted(G, asked), now)
    return told(s, ev.Forecasted(((asked.request_id, certain(asked.max_tokens)),)), now)


def admitted(s: Any, asked: Request, now: float = 0.0, on: str = "w0") -> None:
    submitted(s, asked, now)
    assert asked.request_id in s.workers[on].running


def waits(s: Any, asked: Request, now: float = 0.0) -> None:
    submitted(s, asked, now)
    assert asked.request_id in queued(s)


def queued(s: Any) -> list[str]:
    """In the order of their rows."""
    return [n for n, job in s.jobs.items() if s.ledger.phase(job) is Phase.QUEUED]


def report(s: Any, seq: int, now: float, on: str = "w0", **what: Any) -> Any:
    return told(s, ev.Reported(f"{on}#1", on, Report(seq, 0, **what)), now)


def why(s: Any, name: str) -> Any:
    """Why it waits, by the last round."""
    return s.rounds.why(s.jobs[name])


def test_a_request_from_arrival_to_its_outcome():
    s = state()
    a = request("a")
    assert told(s, worker(), 0.0) == []
    assert s.step(ev.Submitted(G, a), 1.0) == [ev.AskForecast((a,))]
    assert s.round_due_s == inf
    assert s.step(ev.Forecasted((("a", certain(50)),)), 1.5) == []
    assert s.round_due_s <= 1.5
    assert s.step(ev.Round(), 2.0) == [
        ev.Place(G, "a", "w0", "unix:/w0", queued_s=2.0),
        ev.SendPlan("w0", "w0#1", Plan(1, admit=(Grant("a", 50),), victims=("a",))),
    ]
    assert s.round_due_s == inf
    assert report(s, 1, 3.0, progress=(Progress("a", 16, 26),)) == []
    assert report(s, 2, 4.0, finished=(Completion("a", 30, FinishReason.STOP),)) == [
        ev.Learn(Outcome("a", "demo", "", 10, 30, 50, FinishReason.STOP, 4.0, 0)),
        ev.Finish(G, "a", FinishReason.STOP, 30, 0, 2.0),
    ]
    assert not s.jobs and not s.workers["w0"].running


def test_a_report_applied_twice_changes_nothing():
    s = state()
    told(s, worker(), 0.0)
    admitted(s, request("a"))
    done: Any = {"finished": (Completion("a", 30, FinishReason.STOP),)}
    assert len(report(s, 1, 1.0, **done)) == 2
    assert report(s, 1, 1.0, **done) == []


def test_what_happens_at_once_makes_one_round():
    s = state()
    told(s, worker(), 0.0)
    for name in "abc":
        s.step(ev.Submitted(G, request(name)), 1.0)
        assert s.step(ev.Forecasted(((name, certain(50)),)), 1.0) == []
    *places, plan = s.step(ev.Round(), 1.0)
    assert [place.request_id for place in places] == ["a", "b", "c"]
    assert plan.plan == Plan(
        1, admit=tuple(Grant(name, 50) for name in "abc"), victims=("c", "b", "a")
    )
    assert s.rounds.number == 2  # one for the worker, one for all of them


def test_a_round_too_many_only_looks_again():
    s = state()
    told(s, worker(), 0.0)
    admitted(s, request("a"))
    assert s.step(ev.Round(), 0.0) == [] and s.step(ev.Round(), 0.0) == []


def test_what_waits_is_looked_at_again_only_after_an_event():
    s = state()
    told(s, worker(kv_tokens=128), 0.0)
    admitted(s, request("a", prompt=60))
    waits(s, request("b", prompt=60))
    assert (why(s, "b").reason, why(s, "b").a) == (Reason.MEMORY, 64 + 64)
    assert s.step(ev.Tick(), 2.0) == [] and s.round_due_s == inf
    done = (Completion("a", 30, FinishReason.STOP),)
    assert "b" in [a.request_id for a in report(s, 1, 3.0, finished=done) if a.kind == "place"]


def test_the_newest_is_evicted_first_whether_it_has_just_come_or_come_back():
    s = state()
    told(s, worker(), 0.0)
    for name in "ab":
        admitted(s, request(name))
    s.step(ev.Submitted(G, request("c", at=1.0)), 1.0)
    s.step(ev.Forecasted((("c", certain(50)),)), 1.0)
    [*_, plan] = report(s, 1, 1.0, evicted=(Progress("a", 4, 0),))
    assert [grant.request_id for grant in plan.plan.admit] == ["a", "c"]
    assert plan.plan.victims == ("c", "a", "b")


# A batcher of its own


def portions(s: Any, name: str, limit: int = 50, on: str = "w0") -> tuple[ev.Portion, ...]:
    """That this one is to run there."""
    row = s.jobs[name].row
    return (ev.Portion(s.workers[on].number, (row,), (limit,), (), (row,), 0.0),)


def test_apart_a_round_asks_and_its_answer_is_carried_out():
    s = state(apart=True)
    told(s, worker(), 0.0)
    assert submitted(s, request("a")) == [ev.AskArrange(2)]
    assert s.step(ev.Arranged(2, portions(s, "a")), 0.5) == [
        ev.Place(G, "a", "w0", "unix:/w0", queued_s=0.5),
        ev.SendPlan("w0", "w0#1", Plan(1, admit=(Grant("a", 50),), victims=("a",))),
    ]


def test_apart_nobody_is_asked_while_nobody_waits():
    s = state(apart=True)
    told(s, worker(), 0.0)
    submitted(s, request("a"))
    s.step(ev.Arranged(2, portions(s, "a")), 0.0)
    assert report(s, 1, 1.0, progress=(Progress("a", 16, 26),)) == []


def test_what_comes_while_a_round_is_out_waits_for_the_next():
    s = state(apart=True)
    told(s, worker(), 0.0)
    submitted(s, request("a"))
    assert submitted(s, request("b", at=1.0), 1.0) == []
    assert (s.round_due_s, s.step(ev.Round(), 1.0)) == (inf, [])
    place, _ = s.step(ev.Arranged(2, portions(s, "a")), 2.0)
    assert place.request_id == "a" and s.round_due_s <= 2.0
    assert s.step(ev.Round(), 2.0) == [ev.AskArrange(3)]


@pytest.mark.parametrize("number", [1, 3, 0])
def test_an_answer_to_another_round_is_not_taken(number: int):
    s = state(apart=True)
    told(s, worker(), 0.0)
    submitted(s, request("a"))
    assert s.step(ev.Arranged(number, portions(s, "a")), 1.0) == []
    assert s.rounds.contest.round == 2
    assert len(s.step(ev.Arranged(2, portions(s, "a")), 1.0)) == 2
    assert s.step(ev.Arranged(2, portions(s, "a")), 1.0) == []


def test_a_round_that_is_not_answered_is_arranged_at_home():
    s, home = state(apart=True), state()
    for each in (s, home):
        told(each, worker(), 0.0)
    actions = submitted(home, request("a"))
    submitted(s, request("a"))
    assert s.step(ev.Arranged(2, None), 0.0) == actions != []


def test_a_row_that_is_anothers_by_now_is_left_alone():
    s = state(apart=True)
    told(s, worker(), 0.0)
    submitted(s, request("a"))
    answer = portions(s, "a")
    row = s.jobs["a"].row
    s.step(ev.Cancelled(G, "a", FinishReason.CANCELLED, 0), 0.5)
    submitted(s, request("b"), 0.5)
    assert s.jobs["b"].row == row
    assert s.step(ev.Arranged(2, answer), 1.0) == []
    assert queued(s) == ["b"]


def test_an_answer_about_a_worker_that_is_gone_is_not_carried_out():
    s = state(apart=True)
    told(s, worker(), 0.0)
    submitted(s, request("a"))
    answer = portions(s, "a")
    s.step(ev.WorkerLost("w0#1", "w0"), 0.5)
    s.step(worker(), 0.5)
    assert s.step(ev.Arranged(2, answer), 1.0) == []
    assert s.step(ev.Round(), 1.0) == [ev.AskArrange(3)]


# Evictions, slices, ends


def test_an_evicted_request_goes_in_front_and_returns_without_a_new_place():
    s = state()
    told(s, worker(kv_tokens=96), 0.0)
    admitted(s, request("a", prompt=30))
    admitted(s, request("b", prompt=30, at=1.0), 1.0)
    waits(s, request("c", prompt=46, at=2.0), 2.0)
    assert report(s, 1, 3.0, evicted=(Progress("b", 20, 0),))[0] == ev.Preempt(G, "b", 20)
    assert queued(s) == ["b", "c"]
    assert why(s, "b").reason is Reason.MEMORY and why(s, "c").reason is Reason.BEHIND
    assert report(s, 2, 4.0, finished=(Completion("a", 50, FinishReason.LENGTH),))[2:] == [
        ev.Resume(G, "b", held_tokens=0),
        ev.SendPlan("w0", "w0#1", Plan(3, admit=(Grant("b", 50),), victims=("b",))),
    ]


def test_an_evicted_request_may_move_and_its_old_worker_forgets_it():
    s = state()
    told(s, worker(kv_tokens=96), 0.0)
    admitted(s, request("a", prompt=30))
    admitted(s, request("b", prompt=30))
    told(s, worker("w1"), 1.0)
    [preempt, place, *plans] = report(s, 1, 2.0, evicted=(Progress("a", 20, 0),))
    assert preempt == ev.Preempt(G, "a", 20)
    assert place == ev.Place(G, "a", "w1", "unix:/w1", queued_s=0.0)
    assert plans == [
        ev.SendPlan("w0", "w0#1", Plan(3, cancel=("a",), victims=("b",))),
        ev.SendPlan("w1", "w1#1", Plan(1, admit=(Grant("a", 50),), victims=("a",))),
    ]


def test_slices_are_extended_before_they_run_out():
    s: Any = SchedulerState(choose("fcfs", {"slice": "tokens", "slice_tokens": 20}))
    told(s, worker(), 0.0)
    admitted(s, request("a"))
    assert s.ledger.board.jobs.limit[s.jobs["a"].row] == 20
    assert report(s, 1, 1.0, progress=(Progress("a", 9, 19),)) == []
    [plan] = report(s, 2, 2.0, progress=(Progress("a", 12, 22),))
    assert plan.plan == Plan(2, extend=(Grant("a", 32),), victims=("a",))
    [plan] = report(s, 3, 3.0, progress=(Progress("a", 32, 42),))
    assert plan.plan.extend == (Grant("a", 50),)
    assert report(s, 4, 4.0, progress=(Progress("a", 49, 59),)) == []


@pytest.mark.parametrize("policy", ["fcfs", "conservative", "past-future", "fixed-batch"])
def test_a_whole_grant_is_never_extended(policy: str):
    s = state(policy)
    told(s, worker(), 0.0)
    admitted(s, request("a"))
    assert report(s, 1, 1.0, progress=(Progress("a", 49, 59),)) == []


def test_cancelling_at_every_stage_leaves_nothing():
    s = state()
    told(s, worker(), 0.0)
    cancel = ev.Cancelled(G, "a", FinishReason.CANCELLED, 0)
    s.step(ev.Submitted(G, request("a")), 0.0)
    assert told(s, cancel, 0.0) == []  # while forecast
    assert told(s, ev.Forecasted((("a", certain(50)),)), 0.0) == []
    s.step(ev.Submitted(G, request("a")), 0.0)
    s.step(ev.Forecasted((("a", certain(50)),)), 0.0)
    assert told(s, cancel, 0.0) == []  # while queued
    admitted(s, request("a"))
    assert told(s, cancel, 0.0) == [ev.SendPlan("w0", "w0#1", Plan(2, cancel=("a",)))]  # running
    admitted(s, request("a"))
    s.step(ev.Reported("w0#1", "w0", Report(1, 0, evicted=(Progress("a", 4, 0),))), 1.0)
    [plan] = told(s, cancel, 1.0)  # evicted, its tokens still at the worker
    assert plan.plan.cancel == ("a",)
    assert not s.jobs and not queued(s) and not s.workers["w0"].running
    assert len(s.ledger.board.forecasts) == 1  # that of who has none


def test_another_gateway_cannot_cancel_it():
    s = state()
    told(s, worker(), 0.0)
    admitted(s, request("a"))
    assert told(s, ev.Cancelled("other#1", "a", FinishReason.CANCELLED, 0), 0.0) == []
    assert "a" in s.jobs


def test_a_stop_string_is_an_outcome_to_learn_from():
    s = state()
    told(s, worker(), 0.0)
    admitted(s, request("a"))
    learn, plan = told(s, ev.Cancelled(G, "a", FinishReason.STOP, 7), 2.0)
    assert learn.outcome.output_tokens == 7 and learn.outcome.reason is FinishReason.STOP
    assert plan.plan.cancel == ("a",)


def test_a_lost_gateway_takes_its_requests_with_it():
    s = state()
    told(s, worker(kv_tokens=96), 0.0)
    admitted(s, request("a", prompt=40))
    waits(s, request("b", prompt=40, most=20))
    [plan] = told(s, ev.GatewayLost(G), 1.0)
    assert plan.plan == Plan(2, cancel=("a",))
    assert not s.jobs and not queued(s)


def test_a_resubmission_on_a_new_stream_replaces_the_old_one():
    s = state()
    told(s, worker(), 0.0)
    admitted(s, request("a"))
    again = Request("a", "demo", 10, 50, 0.0, delivered_tokens=5)
    ask, plan = told(s, ev.Submitted("gateway#2", again), 1.0)
    assert ask == ev.AskForecast((again,)) and plan.plan.cancel == ("a",)
    assert told(s, ev.GatewayLost(G), 1.0) == []
    assert s.ledger.output(s.jobs["a"]) == 5


def test_a_lost_worker_gives_its_requests_back():
    s = state()
    told(s, worker(), 0.0)
    admitted(s, request("a"))
    report(s, 1, 1.0, progress=(Progress("a", 9, 19),))
    assert told(s, ev.WorkerLost("w0#1", "w0"), 2.0) == [ev.Preempt(G, "a", 9)]
    place, _ = told(s, worker("w1"), 4.0)
    assert place == ev.Place(G, "a", "w1", "unix:/w1", queued_s=2.0)


def test_a_deadline_ends_the_waiting_and_the_running():
    s = state()
    told(s, worker(), 0.0)
    admitted(s, request("a", deadline=5.0))
    s.step(ev.Submitted(G, request("b", at=1.0, deadline=4.0)), 1.0)
    assert s.next_deadline() == 4.0
    assert told(s, ev.Tick(), 3.9) == []
    assert told(s, ev.Tick(), 4.0) == [
        ev.Finish(G, "b", FinishReason.DEADLINE, 0, 0, 3.0, "the deadline passed")
    ]
    finish, plan = told(s, ev.Tick(), 5.0)
    assert finish.reason is FinishReason.DEADLINE and plan.plan.cancel == ("a",)
    assert s.next_deadline() == inf


def test_a_deadline_that_can_not_be_met_any_more_is_told_early():
    """80 tokens of prompt take 0.01 + 80 · 0.0001 s at best: with less left it ends now, not when
    the time is up."""
    s = state()
    told(s, worker(kv_tokens=128), 0.0)
    admitted(s, request("a", prompt=60))
    waits(s, request("b", prompt=80, most=40, deadline=4.0))
    assert report(s, 1, 3.9, progress=(Progress("a", 1, 61),)) == []
    assert report(s, 2, 3.983, progress=(Progress("a", 2, 62),)) == [
        ev.Finish(
            G, "b", FinishReason.DEADLINE, 0, 0, 3.983, "the deadline could not be met any more"
        )
    ]
    assert list(s.jobs) == ["a"]


# At the door


def test_no_is_said_with_its_reason():
    s = state(max_queue=1)
    too_long = s.step(ev.Submitted(G, request("long", prompt=400, most=200)), 0.0)
    assert isinstance(too_long[0], ev.AskForecast)  # no worker yet: it may fit one to come
    [refused] = told(s, worker(), 0.0)
    assert refused.reject == Reject(
        RejectReason.TOO_LONG,
        "prompt (400) + max_tokens (200) = 600 tokens, "
        "but the longest request that fits here is 500 tokens",
    )
    s.step(ev.Submitted(G, request("a")), 0.0)
    [refused] = s.step(ev.Submitted(G, request("a")), 0.0)
    assert refused.reject.reason is RejectReason.DUPLICATE
    [refused] = s.step(ev.Submitted(G, request("b")), 0.0)
    assert refused.reject.reason is RejectReason.QUEUE_FULL
    assert refused.reject.retry_after_s >= 1.0
    s.step(ev.Draining(), 0.0)
    [refused] = s.step(ev.Submitted(G, request("c")), 0.0)
    assert refused.reject.reason is RejectReason.DRAINING


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize(
    ("prompt", "most", "sentence"),
    [
        (10, 0, "prompt (10) and max_tokens (0) must each be at least 1 token"),
        (0, 10, "prompt (0) and max_tokens (10) must each be at least 1 token"),
        (-5, -1, "prompt (-5) and max_tokens (-1) must each be at least 1 token"),
        (
            1,
            2**31,
            "prompt (1) + max_tokens (2147483648) = 2147483649 tokens, "
            "but no request may be longer than 16777215 tokens",
        ),
    ],
)
def test_lengths_that_no_request_can_have_are_refused(
    attached: bool, prompt: int, most: int, sentence: str
):
    """Whether there is a worker to measure them by or not; and nothing of them stays."""
    s = state()
    if attached:
        told(s, worker(), 0.0)
    assert told(s, ev.Submitted(G, request("a", prompt, most)), 0.0) == [
        ev.Refuse(G, "a", Reject(RejectReason.TOO_LONG, sentence))
    ]
    assert not s.jobs and s.round_due_s == inf


@pytest.mark.parametrize(
    "odd",
    [
        Request("a", "demo", 10, 5, 0.0, delivered_tokens=5),
        Request("a", "demo", 10, 5, 0.0, delivered_tokens=400),
        Request("a", "demo", 10, 5, 9e9),
        Request("a", "demo", 10, 5, -9e9),
        Request("a", "demo", 10, 5, 0.0, deadline_s=-1.0),
        Request("a", "demo", 10, 5, 0.0, deadline_s=float("nan")),
        Request("a", "", 10, 5, 0.0),
        Request("", "demo", 10, 5, 0.0, worker_id="nowhere"),
    ],
)
@pytest.mark.parametrize("policy", ["fcfs", "conservative", "past-future", "alise", "fixed-batch"])
def test_an_odd_request_never_raises(policy: str, odd: Request):
    s = state(policy)
    told(s, worker(), 0.0)
    submitted(s, request("b"))
    actions = submitted(s, odd, 1.0)
    report(s, 1, 2.0, progress=(Progress(odd.request_id, 3, 13, 1), Progress("b", 2, 12, 1)))
    told(s, ev.Tick(), 100.0)
    told(s, ev.GatewayLost(G), 101.0)
    assert not s.jobs and isinstance(actions, list)
    assert len(s.ledger.board.forecasts) == 1


def test_a_model_that_no_worker_serves_is_refused_at_once():
    s = state()
    other = Request("b", "other", 10, 50, 0.0)
    assert told(s, ev.Submitted(G, other), 0.0) == [ev.AskForecast((other,))]  # one may come
    assert told(s, worker(), 0.0) == [
        ev.Refuse(
            G,
            "b",
            Reject(RejectReason.NO_MODEL, "no worker serves the model 'other'; known: demo"),
        )
    ]
    [refused] = s.step(ev.Submitted(G, other), 1.0)
    assert refused.reject.reason is RejectReason.NO_MODEL


def test_what_never_fits_is_told_so_though_the_queue_is_full():
    """Not when to try again."""
    s = state(max_queue=1)
    told(s, worker(), 0.0)
    s.step(ev.Submitted(G, request("a")), 0.0)
    [refused] = s.step(ev.Submitted(G, request("long", prompt=400, most=200)), 0.0)
    assert (refused.reject.reason, refused.reject.retry_after_s) == (RejectReason.TOO_LONG, 0.0)
    [refused] = s.step(ev.Submitted(G, Request("b", "other", 10, 50, 0.0)), 0.0)
    assert (refused.reject.reason, refused.reject.retry_after_s) == (RejectReason.NO_MODEL, 0.0)


def busy(**limits: Any) -> Any:
    """8 run, 100 wait; all may make 400 tokens."""
    s = state(**limits)
    told(s, worker(), 0.0)
    for name in "abcdefgh":
        admitted(s, request(name, most=400))
    for i in range(100):
        submitted(s, request(f"q{i}", most=400))
    return s


def test_drain_time_counts_what_is_ahead_over_the_rate():
    assert state().fleet().drain_s == 0.0
    s = busy()
    rate = 8 / s.workers["w0"].cost.step_s(0, 8, 80)
    assert s.fleet().drain_s == pytest.approx(108 * 400 / rate)


def test_who_has_less_time_than_the_queue_takes_is_told_when_to_come_back():
    s = busy()  # some 58 s
    [refused] = s.step(ev.Submitted(G, request("late", deadline=50.0)), 1.0)
    assert refused.reject == Reject(
        RejectReason.TOO_LATE,
        "the queue takes some 58 s, longer than the 49.0 s that this request has; "
        "try again in 58 s, or with a later deadline",
        s.drain_s,
    )
    assert s.step(ev.Submitted(G, request("patient", deadline=70.0)), 1.0)[0].kind == "ask_forecast"
    begun = Request("begun", "demo", 10, 400, 0.0, delivered_tokens=3, deadline_s=50.0)
    assert s.step(ev.Submitted(G, begun), 1.0)[0].kind == "ask_forecast"  # it has waited already


def test_a_refusal_looks_at_no_queue():
    """Whatever waits, it is neither walked nor snapshot: the board may even be gone."""
    s = busy(max_queue=100)
    s.ledger.board.snapshot = s.ledger.board.jobs = s.ledger.board.phase = None
    for asked, reason in [
        (request("x"), RejectReason.QUEUE_FULL),
        (request("x", deadline=1.0), RejectReason.QUEUE_FULL),
        (request("x", prompt=600), RejectReason.TOO_LONG),
        (request("q1"), RejectReason.DUPLICATE),
        (Request("x", "other", 10, 50, 0.0), RejectReason.NO_MODEL),
    ]:
        [refused] = s.step(ev.Submitted(G, asked), 1.0)
        assert refused.reject.reason is reason


# Forecasts


def test_a_refresh_reaches_every_request_of_the_population_and_nobodys_cap():
    s = state("past-future")
    old = from_lengths([50], 2**24 - 1, "history", 1, "history/demo")
    for name, most in {"a": 100, "b": 50, "c": 7}.items():
        s.step(ev.Submitted(G, request(name, most=most)), 0.0)
    s.step(ev.Forecasted((("a", old), ("b", certain(50)), ("c", old))), 0.0)
    assert [r.request_id for r in s.shared_representatives()] in (["a"], ["c"])
    jobs = s.ledger.board.jobs
    rows = [s.jobs[name].row for name in "abc"]
    assert jobs.total[rows].tolist() == [50, 50, 7]
    assert s.ledger.board.forecasts.rows >= len(s.ledger.board.forecasts) == 1 + 2
    s.step(ev.Refreshed((from_lengths([5, 29], 2**24 - 1, "history", 2, "history/demo"),)), 1.0)
    assert jobs.total[rows].tolist() == [17, 50, 6]
    assert jobs.cap[rows].tolist() == [100, 50, 7]
    s.step(ev.Refreshed((from_lengths([9], 2**24 - 1, "history", 1, "history/other"),)), 1.0)
    assert jobs.total[rows].tolist() == [17, 50, 6]  # nobody's population


def test_a_better_forecast_takes_the_place_of_the_one_there_was():
    s = state("past-future")
    history = from_lengths([50], 2**24 - 1, "history", 1, "history/demo")
    s.step(ev.Submitted(G, request("a", most=100)), 0.0)
    s.step(ev.Forecasted((("a", history),)), 0.0)
    s.step(ev.Forecasted((("a", Forecast((20.0,), (1.0,), 100, "retrieval")),)), 1.0)
    assert s.ledger.board.jobs.total[s.jobs["a"].row] == 20
    assert s.shared_representatives() == []
    assert len(s.ledger.board.forecasts) == 1 + 1
    s.step(ev.Forecasted((("gone", history),)), 1.0)  # it has ended meanwhile
    assert len(s.ledger.board.forecasts) == 1 + 1


def test_a_worker_that_is_measured_changes_no_promise():
    s = state("alise")
    told(s, worker(), 0.0)
    admitted(s, request("a"))
    before = s.rounds.memory.columns["promised"].tolist()
    cost = s.workers["w0"].cost
    for version in range(3):
        s.step(ev.Costed("w0", type(cost)(0.02, 1e-3, 1e-3, 0.0, version)), 1.0)
    assert s.round_due_s == inf  # and calls for no round
    s.step(ev.Round(), 1.0)
    assert s.rounds.memory.columns["promised"].tolist() == before
