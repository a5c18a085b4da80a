"""Events whose application raises: what is given up, and when the state must not go on."""

from dataclasses import replace
from typing import Any

import pytest

from services.core import Completion, FinishReason, Report, RequestProgress
from services.scheduler.core import events as ev
from services.scheduler.core.failures.consistency import find_breach
from services.scheduler.core.failures.containment import BrokenState
from tests.scheduler.state_driver import G, admitted, report, request, run_step, state, worker

BROKEN: Any = None  # where a number or a reason belongs


def running(*names: str) -> Any:
    """One worker that runs these requests."""
    s = state()
    run_step(s, worker(), 0.0)
    for name in names:
        admitted(s, request(name))
    return s


def test_new_request_that_raises_ends_alone() -> None:
    s = running("a")
    asked = replace(request("b"), priority=BROKEN)
    actions = s.try_step(ev.Submitted(G, asked), 1.0).actions
    [finish] = [each for each in actions if isinstance(each, ev.Finish)]
    assert (finish.request_id, finish.reason) == ("b", FinishReason.ERROR) and finish.message
    assert isinstance(s.last_step.error, TypeError)
    assert list(s.jobs) == ["a"] and find_breach(s.ledger) == ""
    admitted(s, request("b"), 2.0)
    assert s.last_step.error is None


def test_report_that_raises_halfway_leaves_a_state_that_goes_on() -> None:
    s = running("a", "b")
    half = Report(
        1, 1, finished=(Completion("a", 30, FinishReason.STOP), Completion(*[BROKEN] * 3)),
        evicted=(RequestProgress("b", BROKEN, 19, 2),), free_blocks=60,
    )  # fmt: skip
    step = s.try_step(ev.Reported("w0#1", "w0", half), 1.0)
    actions = step.actions
    assert step.error
    assert [each.request_id for each in actions if isinstance(each, ev.Finish)] == ["a"]
    run_step(s, ev.WorkerLost("w0#1", "w0"), 2.0)  # the service ends its stream
    run_step(s, worker(link="#2"), 3.0)
    assert list(s.workers["w0"].running) == ["b"]


def test_inconsistent_state_does_not_go_on() -> None:
    s = running("a")
    with pytest.raises(BrokenState, match="running requests"):
        report(s, 1, 1.0, finished=(Completion("a", 30, BROKEN),))


def test_errors_of_rounds_are_not_contained() -> None:
    s = running("a")
    s.workers["w0"].view = BROKEN
    with pytest.raises(AttributeError):
        s.step(ev.Round(), 1.0)
