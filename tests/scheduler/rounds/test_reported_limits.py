"""A worker that reports how many requests may run at present gets no more than that."""

from services.core import Completion, FinishReason, RequestProgress
from tests.scheduler.state_driver import admitted, queued, report, request, run_step, state, worker
from tests.scheduler.state_driver import waits as is_queued


def test_reported_limit_holds_until_it_changes() -> None:
    s = state()
    run_step(s, worker(), 0.0)  # runs at most 8
    admitted(s, request("a"))
    admitted(s, request("b"))
    report(s, 1, 1.0, max_running=2)
    is_queued(s, request("c"), 1.0)
    report(s, 2, 2.0, max_running=3)
    assert queued(s) == []
    is_queued(s, request("d"), 2.0)
    report(s, 3, 3.0)  # as announced
    assert queued(s) == []


def test_reported_limit_pauses_no_running_request() -> None:
    """The report of a smaller limit crosses the plan that fills the larger one. The limit holds
    once enough requests have ended."""
    s = state()
    run_step(s, worker(), 0.0)
    names = "abcd"
    for name in names:
        admitted(s, request(name))
    report(s, 1, 1.0, max_running=2)
    assert [*s.workers["w0"].running] == [*names]
    is_queued(s, request("e"), 1.0)
    finished = tuple(Completion(name, 1, FinishReason.STOP) for name in "abc")
    report(s, 2, 2.0, max_running=2, finished=finished[:2])
    assert queued(s) == ["e"]
    report(s, 3, 3.0, max_running=2, finished=finished[2:])
    assert [*s.workers["w0"].running] == ["d", "e"]


def test_reported_limit_is_at_most_the_announced_one() -> None:
    s = state()
    run_step(s, worker(), 0.0)
    report(s, 1, 0.0, max_running=1_000)
    assert s.workers["w0"].slots == 8


def test_evicted_request_goes_to_a_worker_with_room() -> None:
    """A backend that refuses a request for lack of capacity evicts it, and has no slot for it."""
    s = state()
    run_step(s, worker(), 0.0)
    admitted(s, request("a"))
    admitted(s, request("b"))
    run_step(s, worker("w1"), 0.0)
    report(s, 1, 1.0, max_running=1, evicted=(RequestProgress("b", 0, 0),))
    assert set(s.workers["w0"].running) == {"a"}
    assert set(s.workers["w1"].running) == {"b"}
