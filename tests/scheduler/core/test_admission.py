"""Admission and the reasons of refusals."""

from math import inf
from typing import Any

import pytest

from services.core import (
    Reject,
    RejectReason,
    Request,
    RequestProgress,
)
from services.scheduler.core import events as ev
from tests.scheduler.state_driver import (
    G,
    admitted,
    report,
    request,
    run_step,
    state,
    submitted,
    worker,
)


def test_refusals_name_their_reason():
    s = state(max_queue=1)
    too_long = s.step(ev.Submitted(G, request("long", prompt=400, most=200)), 0.0)
    assert isinstance(too_long[0], ev.AskForecast)  # no worker yet: one that fits may attach
    [refused] = run_step(s, worker(), 0.0)
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
def test_invalid_lengths_are_refused(attached: bool, prompt: int, most: int, sentence: str):
    """Invalid lengths are refused with and without a worker, and leave no state."""
    s = state()
    if attached:
        run_step(s, worker(), 0.0)
    assert run_step(s, ev.Submitted(G, request("a", prompt, most)), 0.0) == [
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
@pytest.mark.parametrize("policy", ["fcfs", "conservative", "past-future", "alise", "vs"])
def test_unusual_request_never_raises(policy: str, odd: Request):
    s = state(policy)
    run_step(s, worker(), 0.0)
    submitted(s, request("b"))
    actions = submitted(s, odd, 1.0)
    report(
        s,
        1,
        2.0,
        progress=(RequestProgress(odd.request_id, 3, 13, 1), RequestProgress("b", 2, 12, 1)),
    )
    run_step(s, ev.Tick(), 100.0)
    run_step(s, ev.GatewayLost(G), 101.0)
    assert not s.jobs and isinstance(actions, list)
    assert len(s.ledger.board.forecasts) == 1


def test_unknown_model_is_refused_at_once():
    s = state()
    other = Request("b", "other", 10, 50, 0.0)
    assert run_step(s, ev.Submitted(G, other), 0.0) == [
        ev.AskForecast((other,))
    ]  # a worker that serves it may attach
    assert run_step(s, worker(), 0.0) == [
        ev.Refuse(
            G,
            "b",
            Reject(RejectReason.NO_MODEL, "no worker serves the model 'other'; known: demo"),
        )
    ]
    [refused] = s.step(ev.Submitted(G, other), 1.0)
    assert refused.reject.reason is RejectReason.NO_MODEL


def test_too_long_takes_precedence_over_full_queue():
    """The refusal names no retry time."""
    s = state(max_queue=1)
    run_step(s, worker(), 0.0)
    s.step(ev.Submitted(G, request("a")), 0.0)
    [refused] = s.step(ev.Submitted(G, request("long", prompt=400, most=200)), 0.0)
    assert (refused.reject.reason, refused.reject.retry_after_s) == (RejectReason.TOO_LONG, 0.0)
    [refused] = s.step(ev.Submitted(G, Request("b", "other", 10, 50, 0.0)), 0.0)
    assert (refused.reject.reason, refused.reject.retry_after_s) == (RejectReason.NO_MODEL, 0.0)


def busy(**limits: Any) -> Any:
    """8 requests run and 100 wait; each may generate 400 tokens."""
    s = state(**limits)
    run_step(s, worker(), 0.0)
    for name in "abcdefgh":
        admitted(s, request(name, most=400))
    for i in range(100):
        submitted(s, request(f"q{i}", most=400))
    return s


def test_drain_time_is_remaining_work_over_rate():
    assert state().fleet().drain_s == 0.0
    s = busy()
    rate = 8 / s.workers["w0"].cost.step_s(0, 8, 80)
    assert s.fleet().drain_s == pytest.approx(108 * 400 / rate)


def test_deadline_before_drain_time_is_refused_with_retry_time():
    s = busy()  # some 58 s
    [refused] = s.step(ev.Submitted(G, request("late", deadline=50.0)), 1.0)
    assert refused.reject == Reject(
        RejectReason.TOO_LATE,
        "the queue drains in about 58 s, longer than the 49.0 s until the deadline; "
        "try again in 58 s, or with a later deadline",
        s.drain_s,
    )
    patient = s.step(ev.Submitted(G, request("patient", deadline=70.0)), 1.0)
    assert isinstance(patient[0], ev.AskForecast)
    begun = Request("begun", "demo", 10, 400, 0.0, delivered_tokens=3, deadline_s=50.0)
    resubmitted = s.step(ev.Submitted(G, begun), 1.0)
    assert isinstance(resubmitted[0], ev.AskForecast)  # it was submitted before


def test_refusal_is_constant_time():
    """The check neither walks the queue nor takes a snapshot: it works without a board."""
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
