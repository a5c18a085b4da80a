"""Moves of paused requests between workers: transcripts."""

from typing import Any

import pytest

from services.core import Grant, Report, Request, RequestProgress, WorkerView
from services.costs import CostModel
from services.policies.preset import choose
from services.policies.snapshot import NOWHERE
from services.scheduler.core import events as ev
from services.scheduler.core.phases import RequestPhase
from services.scheduler.core.state import SchedulerState
from tests.scheduler.state_driver import G, run_step, submitted

COST = CostModel(base_s=0.0, prefill_token_s=0.001, decode_seq_s=0.01, context_token_s=0.0)


def attach(s: Any, name: str, now: float = 0.0) -> Any:
    """Attach a worker with one slot."""
    view = WorkerView(name, f"unix:/{name}", "demo", 2_000, 16, 1, 900)
    s.step(ev.WorkerAttached(f"{name}#1", view), now)
    return run_step(s, ev.Costed(name, COST), now)


def paused(gain: float) -> Any:
    """`a`, with 100 prompt and 5 output tokens, is paused for the shorter `b`."""
    s = SchedulerState(choose("alise", {"place": "max_min", "move_gain": gain}))
    attach(s, "w0")
    submitted(s, Request("a", "demo", 100, 700, 0.0), 0.0)
    run_step(
        s, ev.Reported("w0#1", "w0", Report(1, 1, progress=(RequestProgress("a", 5, 104, 7),))), 0.5
    )
    submitted(s, Request("b", "demo", 10, 30, 1.0), 1.0)
    assert list(s.workers["w0"].running) == ["b"] and s.workers["w0"].pausing == {"a": 3}
    return s


def stopped(s: Any) -> Any:
    here = (RequestProgress("a", 6, 105, 7), RequestProgress("b", 1, 10, 1))
    return run_step(s, ev.Reported("w0#1", "w0", Report(2, 3, progress=here, free_blocks=117)), 1.5)


def rests(gain: float) -> tuple[Any, Any]:
    """`a` has stopped, then a second worker attaches; returns the actions of that round."""
    s = paused(gain)
    stopped(s)
    return s, attach(s, "w1", 1.5)


def test_move_is_cancel_grant_and_place() -> None:
    s, actions = rests(gain=1.0)
    job, jobs = s.jobs["a"], s.ledger.board.jobs
    plans = {a.worker_id: a.plan for a in actions if isinstance(a, ev.SendPlan)}
    assert plans["w0"].cancel == ("a",)
    # Rounds after 0.5 and 0 s: a mean of 0.9 · 0.05 s, or 4.5 steps, of which a slice outlasts two.
    assert plans["w1"].admit == (Grant("a", 6 + 32 + 9),)
    assert [a for a in actions if isinstance(a, ev.Place | ev.Resume | ev.Preempt)] == [
        ev.Place(G, "a", "w1", "unix:/w1", 0.5)
    ]
    assert (s.ledger.home(job), jobs.held[job.row], jobs.blocks[job.row]) == ("w1", 0, 0)
    assert jobs.output[job.row] == 6
    assert list(s.workers["w1"].running) == ["a"]


def test_late_reports_of_old_home_are_ignored() -> None:
    s, _ = rests(gain=1.0)
    late = Report(
        3, 2, progress=(RequestProgress("a", 7, 106, 7),), evicted=(RequestProgress("a", 7, 106),)
    )
    run_step(s, ev.Reported("w0#1", "w0", late), 2.0)
    job = s.jobs["a"]
    assert (s.ledger.home(job), s.ledger.held(job), s.ledger.output(job)) == ("w1", 0, 6)
    here = Report(1, 1, progress=(RequestProgress("a", 9, 108, 7),))
    run_step(s, ev.Reported("w1#1", "w1", here), 3.0)
    assert (s.ledger.held(job), s.ledger.output(job)) == (108, 9)


@pytest.mark.parametrize("gain", [0.0, 3.0])
def test_request_stays_when_move_gain_is_too_small(gain: float) -> None:
    """29 tokens of `b` take 0.29 s, 2.7 times the 0.106 s of recomputing `a`."""
    s, actions = rests(gain)
    assert not [a for a in actions if isinstance(a, ev.Place | ev.SendPlan)]
    assert s.ledger.home(s.jobs["a"]) == "w0"


def test_unconfirmed_pause_blocks_move() -> None:
    """A worker is free: the request moves there once its home confirms the pause."""
    s = paused(gain=1.0)
    job = s.jobs["a"]
    attach(s, "w1", 1.0)
    assert s.ledger.phase(job) is RequestPhase.QUEUED and s.ledger.home(job) == "w0"
    assert not s.workers["w1"].running
    actions = stopped(s)
    assert [(type(a), a.request_id) for a in actions if isinstance(a, ev.Preempt | ev.Place)] == [
        (ev.Preempt, "a"),
        (ev.Place, "a"),
    ]
    assert list(s.workers["w1"].running) == ["a"]


def test_loss_of_old_home_does_not_requeue_moved_request() -> None:
    s, _ = rests(gain=1.0)
    run_step(s, ev.WorkerLost("w0#1", "w0"), 2.0)
    assert s.ledger.home(s.jobs["a"]) == "w1"
    run_step(s, ev.WorkerLost("w1#1", "w1"), 3.0)
    job = s.jobs["a"]
    assert s.ledger.board.jobs.home[job.row] == NOWHERE and s.ledger.output(job) == 6
