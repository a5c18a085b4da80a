"""The scheduler's core as transcripts: events, and all actions they cause."""

from dataclasses import replace
from math import inf
from typing import Any

import pytest

from services.core import (
    Completion,
    FinishReason,
    Grant,
    LiveAnswers,
    Outcome,
    Plan,
    Report,
    Request,
    RequestProgress,
)
from services.forecast import Forecast, certain, from_lengths
from services.policies.decision import MemoryShort, WaitReason
from services.policies.preset import choose
from services.scheduler.core import events as ev
from services.scheduler.core.populations import live_answers, shared_representatives
from services.scheduler.core.state import SchedulerState
from tests.scheduler.state_driver import (
    G,
    admitted,
    queued,
    report,
    request,
    run_step,
    state,
    waits,
    why,
    worker,
)


def test_request_from_arrival_to_outcome():
    s = state()
    a = request("a")
    assert run_step(s, worker(), 0.0) == []
    assert s.step(ev.Submitted(G, a), 1.0) == [ev.AskForecast((a,))]
    assert s.round_due_s == inf
    assert s.step(ev.Forecasted((("a", certain(50)),)), 1.5) == []
    assert s.round_due_s <= 1.5
    assert s.step(ev.Round(), 2.0) == [
        ev.Place(G, "a", "w0", "unix:/w0", queued_s=2.0),
        ev.SendPlan("w0", "w0#1", Plan(1, admit=(Grant("a", 50),), victims=("a",))),
    ]
    assert s.round_due_s == inf
    assert report(s, 1, 3.0, progress=(RequestProgress("a", 16, 26),)) == []
    assert report(s, 2, 4.0, finished=(Completion("a", 30, FinishReason.STOP),)) == [
        ev.Learn(Outcome("a", "demo", "", 10, 30, 50, FinishReason.STOP, 4.0, 0)),
        ev.Finish(G, "a", FinishReason.STOP, 30, 0, 2.0),
    ]
    assert not s.jobs and not s.workers["w0"].running


def test_report_is_idempotent():
    s = state()
    run_step(s, worker(), 0.0)
    admitted(s, request("a"))
    done: Any = {"finished": (Completion("a", 30, FinishReason.STOP),)}
    assert len(report(s, 1, 1.0, **done)) == 2
    assert report(s, 1, 1.0, **done) == []


def test_simultaneous_events_make_one_round():
    s = state()
    run_step(s, worker(), 0.0)
    for name in "abc":
        s.step(ev.Submitted(G, request(name)), 1.0)
        assert s.step(ev.Forecasted(((name, certain(50)),)), 1.0) == []
    *places, plan = s.step(ev.Round(), 1.0)
    assert [place.request_id for place in places] == ["a", "b", "c"]
    assert plan.plan == Plan(
        1, admit=tuple(Grant(name, 50) for name in "abc"), victims=("c", "b", "a")
    )
    assert s.rounds.number == 2  # one round for the worker, one for all requests


def test_extra_round_changes_nothing():
    s = state()
    run_step(s, worker(), 0.0)
    admitted(s, request("a"))
    assert s.step(ev.Round(), 0.0) == [] and s.step(ev.Round(), 0.0) == []


def test_waiting_requests_are_reconsidered_only_after_event():
    s = state()
    run_step(s, worker(kv_tokens=128), 0.0)
    admitted(s, request("a", prompt=60))
    waits(s, request("b", prompt=60))
    assert why(s, "b") == MemoryShort(64 + 64, 0.95 * 128)
    assert s.step(ev.Tick(), 2.0) == [] and s.round_due_s == inf
    done = (Completion("a", 30, FinishReason.STOP),)
    assert "b" in [
        a.request_id for a in report(s, 1, 3.0, finished=done) if isinstance(a, ev.Place)
    ]


def test_newest_admission_is_first_victim():
    s = state()
    run_step(s, worker(), 0.0)
    for name in "ab":
        admitted(s, request(name))
    s.step(ev.Submitted(G, request("c", at=1.0)), 1.0)
    s.step(ev.Forecasted((("c", certain(50)),)), 1.0)
    [*_, plan] = report(s, 1, 1.0, evicted=(RequestProgress("a", 4, 0),))
    assert [grant.request_id for grant in plan.plan.admit] == ["a", "c"]
    assert plan.plan.victims == ("c", "a", "b")


def test_evicted_request_resumes_first_without_placement():
    s = state()
    run_step(s, worker(kv_tokens=96), 0.0)
    admitted(s, request("a", prompt=30))
    admitted(s, request("b", prompt=30, at=1.0), 1.0)
    waits(s, request("c", prompt=46, at=2.0), 2.0)
    assert report(s, 1, 3.0, evicted=(RequestProgress("b", 20, 0),))[0] == ev.Preempt(G, "b", 20)
    assert queued(s) == ["b", "c"]
    assert why(s, "b").reason is WaitReason.MEMORY and why(s, "c").reason is WaitReason.BLOCKED
    assert report(s, 2, 4.0, finished=(Completion("a", 50, FinishReason.LENGTH),))[2:] == [
        ev.Resume(G, "b", held_tokens=0),
        ev.SendPlan("w0", "w0#1", Plan(3, admit=(Grant("b", 50),), victims=("b",))),
    ]


def test_evicted_request_may_move_and_old_worker_cancels_it():
    s = state()
    run_step(s, worker(kv_tokens=96), 0.0)
    admitted(s, request("a", prompt=30))
    admitted(s, request("b", prompt=30))
    run_step(s, worker("w1"), 1.0)
    [preempt, place, *plans] = report(s, 1, 2.0, evicted=(RequestProgress("a", 20, 0),))
    assert preempt == ev.Preempt(G, "a", 20)
    assert place == ev.Place(G, "a", "w1", "unix:/w1", queued_s=0.0)
    assert plans == [
        ev.SendPlan("w0", "w0#1", Plan(3, cancel=("a",), victims=("b",))),
        ev.SendPlan("w1", "w1#1", Plan(1, admit=(Grant("a", 50),), victims=("a",))),
    ]


def test_slices_are_extended_before_exhaustion():
    s: Any = SchedulerState(choose("fcfs", {"slice": "tokens", "slice_tokens": 20}))
    run_step(s, worker(kv_tokens=160), 0.0)
    admitted(s, request("a", prompt=40))
    waits(s, request("b", prompt=108))
    assert s.ledger.board.jobs.limit[s.jobs["a"].row] == 20
    assert report(s, 1, 0.0, progress=(RequestProgress("a", 9, 49),)) == []
    [plan] = report(s, 2, 0.0, progress=(RequestProgress("a", 12, 52),))
    assert plan.plan == Plan(2, extend=(Grant("a", 32),), victims=("a",))
    [plan] = report(s, 3, 0.0, progress=(RequestProgress("a", 32, 72),))
    assert plan.plan.extend == (Grant("a", 50),)
    assert report(s, 4, 0.0, progress=(RequestProgress("a", 49, 89),)) == []


def test_slice_is_extended_to_the_whole_answer_while_no_request_waits():
    s: Any = SchedulerState(choose("fcfs", {"slice": "tokens", "slice_tokens": 20}))
    run_step(s, worker(), 0.0)
    admitted(s, request("a"))
    [plan] = report(s, 1, 1.0, progress=(RequestProgress("a", 9, 19),))
    assert plan.plan == Plan(2, extend=(Grant("a", 50),), victims=("a",))
    assert report(s, 2, 2.0, progress=(RequestProgress("a", 32, 42),)) == []


@pytest.mark.parametrize("policy", ["fcfs", "conservative", "past-future", "vs"])
def test_grant_of_max_tokens_is_never_extended(policy: str):
    s = state(policy)
    run_step(s, worker(), 0.0)
    admitted(s, request("a"))
    assert report(s, 1, 1.0, progress=(RequestProgress("a", 49, 59),)) == []


def test_cancel_in_every_phase_leaves_no_state():
    s = state()
    run_step(s, worker(), 0.0)
    cancel = ev.Cancelled(G, "a", FinishReason.CANCELLED, 0)
    s.step(ev.Submitted(G, request("a")), 0.0)
    assert run_step(s, cancel, 0.0) == []  # while forecast
    assert run_step(s, ev.Forecasted((("a", certain(50)),)), 0.0) == []
    s.step(ev.Submitted(G, request("a")), 0.0)
    s.step(ev.Forecasted((("a", certain(50)),)), 0.0)
    assert run_step(s, cancel, 0.0) == []  # while queued
    admitted(s, request("a"))
    assert run_step(s, cancel, 0.0) == [
        ev.SendPlan("w0", "w0#1", Plan(2, cancel=("a",)))
    ]  # running
    admitted(s, request("a"))
    s.step(ev.Reported("w0#1", "w0", Report(1, 0, evicted=(RequestProgress("a", 4, 0),))), 1.0)
    [plan] = run_step(s, cancel, 1.0)  # evicted, its tokens still at the worker
    assert plan.plan.cancel == ("a",)
    assert not s.jobs and not queued(s) and not s.workers["w0"].running
    assert len(s.ledger.board.forecasts) == 1  # the row of requests without a forecast


def test_other_gateway_cannot_cancel_request():
    s = state()
    run_step(s, worker(), 0.0)
    admitted(s, request("a"))
    assert run_step(s, ev.Cancelled("other#1", "a", FinishReason.CANCELLED, 0), 0.0) == []
    assert "a" in s.jobs


def test_stop_string_is_learned_as_outcome():
    s = state()
    run_step(s, worker(), 0.0)
    admitted(s, request("a"))
    learn, plan = run_step(s, ev.Cancelled(G, "a", FinishReason.STOP, 7), 2.0)
    assert learn.outcome.output_tokens == 7 and learn.outcome.reason is FinishReason.STOP
    assert plan.plan.cancel == ("a",)


def test_lost_gateway_drops_its_requests():
    s = state()
    run_step(s, worker(kv_tokens=96), 0.0)
    admitted(s, request("a", prompt=40))
    waits(s, request("b", prompt=40, most=20))
    [plan] = run_step(s, ev.GatewayLost(G), 1.0)
    assert plan.plan == Plan(2, cancel=("a",))
    assert not s.jobs and not queued(s)


def test_resubmission_on_new_stream_supersedes_request():
    s = state()
    run_step(s, worker(), 0.0)
    admitted(s, request("a"))
    again = Request("a", "demo", 10, 50, 0.0, delivered_tokens=5)
    ask, plan = run_step(s, ev.Submitted("gateway#2", again), 1.0)
    assert ask == ev.AskForecast((again,)) and plan.plan.cancel == ("a",)
    assert run_step(s, ev.GatewayLost(G), 1.0) == []
    assert s.ledger.output(s.jobs["a"]) == 5


def test_lost_worker_requeues_its_requests():
    s = state()
    run_step(s, worker(), 0.0)
    admitted(s, request("a"))
    report(s, 1, 1.0, progress=(RequestProgress("a", 9, 19),))
    assert run_step(s, ev.WorkerLost("w0#1", "w0"), 2.0) == [ev.Preempt(G, "a", 9)]
    place, _ = run_step(s, worker("w1"), 4.0)
    assert place == ev.Place(G, "a", "w1", "unix:/w1", queued_s=2.0)


def test_request_without_forecast_runs_if_max_tokens_fit():
    """A request waits a millisecond for its forecast; then all 50 tokens are assumed. `b` would
    need 16 + 470 tokens, and 475 may be planned: it waits for its forecast and is admitted with
    it."""
    s = state("past-future")
    run_step(s, worker(kv_tokens=500), 0.0)
    assert run_step(s, ev.Submitted(G, request("a")), 1.0) == [ev.AskForecast((request("a"),))]
    assert s.next_deadline() == 1.001
    place, plan = run_step(s, ev.Tick(), 1.001)
    assert (place.request_id, plan.plan.admit) == ("a", (Grant("a", 50),))
    run_step(s, ev.Submitted(G, request("b", most=470)), 2.0)
    assert run_step(s, ev.Tick(), 2.001) == []
    place, _ = run_step(s, ev.Forecasted((("b", certain(40)),)), 2.02)
    assert place.request_id == "b"


def test_deadline_ends_waiting_and_running_requests():
    s = state(patience_s=10.0)
    run_step(s, worker(), 0.0)
    admitted(s, request("a", deadline=5.0))
    s.step(ev.Submitted(G, request("b", at=1.0, deadline=4.0)), 1.0)
    assert s.next_deadline() == 4.0
    assert run_step(s, ev.Tick(), 3.9) == []
    assert run_step(s, ev.Tick(), 4.0) == [
        ev.Finish(G, "b", FinishReason.DEADLINE, 0, 0, 3.0, "the deadline passed")
    ]
    finish, plan = run_step(s, ev.Tick(), 5.0)
    assert finish.reason is FinishReason.DEADLINE and plan.plan.cancel == ("a",)
    assert s.next_deadline() == inf


def test_unreachable_deadline_ends_request_early():
    """80 prompt tokens take at least 0.01 + 80 · 0.0001 s: a request with less time left ends now,
    not at its deadline."""
    s = state()
    run_step(s, worker(kv_tokens=128), 0.0)
    admitted(s, request("a", prompt=60))
    waits(s, request("b", prompt=80, most=40, deadline=4.0))
    assert report(s, 1, 3.9, progress=(RequestProgress("a", 1, 61),)) == []
    assert report(s, 2, 3.983, progress=(RequestProgress("a", 2, 62),)) == [
        ev.Finish(
            G, "b", FinishReason.DEADLINE, 0, 0, 3.983, "the deadline could not be met any more"
        )
    ]
    assert list(s.jobs) == ["a"]


def test_refresh_updates_whole_population_within_caps():
    s = state("past-future")
    old = from_lengths([50], 2**24 - 1, "history", 1, "history/demo")
    for name, most in {"a": 100, "b": 50, "c": 7}.items():
        s.step(ev.Submitted(G, request(name, most=most)), 0.0)
    s.step(ev.Forecasted((("a", old), ("b", certain(50)), ("c", old))), 0.0)
    assert [r.request_id for r in shared_representatives(s.ledger)] in (["a"], ["c"])
    jobs = s.ledger.board.jobs
    rows = [s.jobs[name].row for name in "abc"]
    assert jobs.total[rows].tolist() == [50, 50, 7]
    assert s.ledger.board.forecasts.rows >= len(s.ledger.board.forecasts) == 1 + 2
    s.step(ev.Refreshed((from_lengths([5, 29], 2**24 - 1, "history", 2, "history/demo"),)), 1.0)
    assert jobs.total[rows].tolist() == [17, 50, 6]
    assert jobs.cap[rows].tolist() == [100, 50, 7]
    s.step(ev.Refreshed((from_lengths([9], 2**24 - 1, "history", 1, "history/other"),)), 1.0)
    assert jobs.total[rows].tolist() == [17, 50, 6]  # no such population


def test_live_answers_list_the_tokens_of_requests_that_have_not_ended():
    s = state()
    run_step(s, worker(), 0.0)
    for name, application in {"a": "", "b": "copy", "c": "copy", "d": "", "e": ""}.items():
        admitted(s, replace(request(name), application=application))
    assert live_answers(s.ledger) == []
    grown = {"a": 3, "b": 7, "c": 5, "d": 9, "e": 0}
    report(s, 1, 1.0, progress=tuple(RequestProgress(n, k, 10 + k) for n, k in grown.items()))
    report(s, 2, 2.0, finished=(Completion("d", 9, FinishReason.STOP),))
    assert live_answers(s.ledger) == [
        LiveAnswers("demo", "", (3,)),
        LiveAnswers("demo", "copy", (7, 5)),
    ]


def test_many_live_answers_are_an_even_sample(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("services.scheduler.core.populations.MAX_LIVE_ANSWERS", 2)
    s = state()
    run_step(s, worker(), 0.0)
    for name in "abcd":
        admitted(s, request(name))
    grown = {"a": 3, "b": 7, "c": 5, "d": 9}
    report(s, 1, 1.0, progress=tuple(RequestProgress(n, k, 10 + k) for n, k in grown.items()))
    [sample] = live_answers(s.ledger)
    assert sample.output_tokens == (3, 5)


def test_improved_forecast_replaces_first():
    s = state("past-future")
    history = from_lengths([50], 2**24 - 1, "history", 1, "history/demo")
    s.step(ev.Submitted(G, request("a", most=100)), 0.0)
    s.step(ev.Forecasted((("a", history),)), 0.0)
    s.step(ev.Forecasted((("a", Forecast((20.0,), (1.0,), 100, "retrieval")),)), 1.0)
    assert s.ledger.board.jobs.total[s.jobs["a"].row] == 20
    assert shared_representatives(s.ledger) == []
    assert len(s.ledger.board.forecasts) == 1 + 1
    s.step(ev.Forecasted((("gone", history),)), 1.0)  # the request has ended
    assert len(s.ledger.board.forecasts) == 1 + 1


def test_new_cost_model_keeps_promises():
    s = state("alise")
    run_step(s, worker(), 0.0)
    admitted(s, request("a"))
    before = s.rounds.memory.ranks.values["expected_tokens"].tolist()
    cost = s.workers["w0"].cost
    for version in range(3):
        s.step(ev.Costed("w0", type(cost)(0.02, 1e-3, 1e-3, 0.0, version)), 1.0)
    assert s.round_due_s == inf  # and no round is due
    s.step(ev.Round(), 1.0)
    assert s.rounds.memory.ranks.values["expected_tokens"].tolist() == before
