"""Rounds arranged by a batcher process: asked, answered, stale, or unanswered."""

from math import inf
from typing import Any

import pytest

from services.core import (
    FinishReason,
    Grant,
    Plan,
    RequestProgress,
)
from services.scheduler.core import events as ev
from tests.scheduler.state_driver import (
    G,
    queued,
    report,
    request,
    run_step,
    state,
    submitted,
    worker,
)


def workers(s: Any, name: str, limit: int = 50, on: str = "w0") -> tuple[ev.WorkerDecisionRow, ...]:
    """Decide that this request runs on that worker."""
    row = s.jobs[name].row
    return (ev.WorkerDecisionRow(s.workers[on].number, (row,), (limit,), (), (row,), 0.0),)


def test_round_asks_batcher_and_applies_answer():
    s = state(apart=True)
    run_step(s, worker(), 0.0)
    assert submitted(s, request("a")) == [ev.AskArrange(2)]
    assert s.step(ev.Arranged(2, workers(s, "a")), 0.5) == [
        ev.Place(G, "a", "w0", "unix:/w0", queued_s=0.5),
        ev.SendPlan("w0", "w0#1", Plan(1, admit=(Grant("a", 50),), victims=("a",))),
    ]


def test_batcher_is_not_asked_without_waiting_requests():
    s = state(apart=True)
    run_step(s, worker(), 0.0)
    submitted(s, request("a"))
    s.step(ev.Arranged(2, workers(s, "a")), 0.0)
    assert report(s, 1, 1.0, progress=(RequestProgress("a", 16, 26),)) == []


def test_events_during_pending_round_wait_for_next():
    s = state(apart=True)
    run_step(s, worker(), 0.0)
    submitted(s, request("a"))
    assert submitted(s, request("b", at=1.0), 1.0) == []
    assert (s.round_due_s, s.step(ev.Round(), 1.0)) == (inf, [])
    place, _ = s.step(ev.Arranged(2, workers(s, "a")), 2.0)
    assert place.request_id == "a" and s.round_due_s <= 2.0
    assert s.step(ev.Round(), 2.0) == [ev.AskArrange(3)]


@pytest.mark.parametrize("number", [1, 3, 0])
def test_state_ignores_answer_to_another_round(number: int):
    s = state(apart=True)
    run_step(s, worker(), 0.0)
    submitted(s, request("a"))
    assert s.step(ev.Arranged(number, workers(s, "a")), 1.0) == []
    assert s.rounds.candidates.round == 2
    assert len(s.step(ev.Arranged(2, workers(s, "a")), 1.0)) == 2
    assert s.step(ev.Arranged(2, workers(s, "a")), 1.0) == []


def test_unanswered_round_is_arranged_in_process():
    s, home = state(apart=True), state()
    for each in (s, home):
        run_step(each, worker(), 0.0)
    actions = submitted(home, request("a"))
    submitted(s, request("a"))
    assert s.step(ev.Arranged(2, None), 0.0) == actions != []


def test_reused_row_is_skipped():
    s = state(apart=True)
    run_step(s, worker(), 0.0)
    submitted(s, request("a"))
    answer = workers(s, "a")
    row = s.jobs["a"].row
    s.step(ev.Cancelled(G, "a", FinishReason.CANCELLED, 0), 0.5)
    submitted(s, request("b"), 0.5)
    assert s.jobs["b"].row == row
    assert s.step(ev.Arranged(2, answer), 1.0) == []
    assert queued(s) == ["b"]


def test_decision_for_detached_worker_is_skipped():
    s = state(apart=True)
    run_step(s, worker(), 0.0)
    submitted(s, request("a"))
    answer = workers(s, "a")
    s.step(ev.WorkerLost("w0#1", "w0"), 0.5)
    s.step(worker(), 0.5)
    assert s.step(ev.Arranged(2, answer), 1.0) == []
    assert s.step(ev.Round(), 1.0) == [ev.AskArrange(3)]
