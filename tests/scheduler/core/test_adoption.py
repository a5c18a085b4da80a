"""State that workers and gateways bring along: a restarted scheduler, a returning worker, and a
worker with an existing name."""

from math import inf
from typing import Any

import pytest

from services.core import (
    Completion,
    FinishReason,
    Grant,
    HeldRequest,
    Reject,
    RejectReason,
    Request,
    RequestProgress,
    WorkerView,
)
from services.forecast import certain
from services.scheduler.core import events as ev
from services.scheduler.core.phases import RequestPhase
from tests.scheduler.state_driver import (
    G,
    admitted,
    queued,
    report,
    request,
    run_step,
    state,
    submitted,
    waits,
    worker,
)

ADOPT_S = 10.0


def held(name: str, running: bool = True, output: int = 20) -> HeldRequest:
    """A request as reported by its worker: a prompt of 10, `generated` of 50 tokens, all in KV."""
    return HeldRequest(name, 10, 50, output, 10 + output, 50, running, 2)


def back(*has: HeldRequest, name: str = "w0", link: str = "#1", model: str = "demo") -> Any:
    """Attach a worker that reports existing requests."""
    view = WorkerView(name, f"unix:/{name}", model, 1_000, 16, 8, 500)
    return ev.WorkerAttached(name + link, view, has)


def again(name: str, at: str = "w0", delivered: int = 18, model: str = "demo") -> Request:
    """Submit a request as a gateway announces it to a restarted scheduler."""
    return Request(name, model, 10, 50, 0.0, delivered_tokens=delivered, worker_id=at)


def numbers(s: Any, name: str) -> dict[str, Any]:
    job, jobs = s.jobs[name], s.ledger.board.jobs
    return {
        "phase": s.ledger.phase(job),
        "home": s.ledger.home(job),
        "output": s.ledger.output(job),
        "held": s.ledger.held(job),
        "blocks": int(jobs.blocks[job.row]),
        "limit": int(jobs.limit[job.row]),
    }


RUNS = {
    "home": "w0",
    "output": 20,
    "held": 30,
    "blocks": 2,
    "limit": 50,
    "phase": RequestPhase.RUNNING,
}


def test_worker_attached_first_keeps_request_submitted_later() -> None:
    s = state()
    assert run_step(s, back(held("a")), 0.0) == []
    ask, resume = run_step(s, ev.Submitted(G, again("a")), 1.0)
    assert (type(ask), resume) == (ev.AskForecast, ev.Resume(G, "a", held_tokens=30))
    assert numbers(s, "a") == RUNS
    assert run_step(s, ev.Forecasted((("a", certain(50)),)), 1.1) == []  # the plan changes nothing
    assert report(s, 1, 2.0, progress=(RequestProgress("a", 30, 40, 3),)) == []
    learn, finish = report(s, 2, 3.0, finished=(Completion("a", 50, FinishReason.LENGTH),))
    assert (learn.outcome.output_tokens, finish.output_tokens, finish.preemptions) == (50, 50, 0)


def test_request_submitted_first_awaits_its_worker() -> None:
    s = state()
    run_step(s, back(name="w1"), 0.0)
    assert [type(a) for a in run_step(s, ev.Submitted(G, again("a")), 1.0)] == [ev.AskForecast]
    run_step(s, ev.Forecasted((("a", certain(50)),)), 1.1)
    assert numbers(s, "a")["phase"] is RequestPhase.AWAITING_WORKER  # w1 is not attached
    assert run_step(s, back(held("a")), 5.0) == [ev.Resume(G, "a", held_tokens=30)]
    assert numbers(s, "a") == RUNS
    assert run_step(s, ev.Tick(), 1.0 + ADOPT_S) == []
    assert numbers(s, "a") == RUNS


def test_adopted_paused_request_waits_with_its_kv() -> None:
    s = state()
    run_step(s, back(held("a", running=False)), 0.0)
    actions = run_step(s, ev.Submitted(G, again("a")), 1.0)
    assert [type(a) for a in actions] == [ev.AskForecast, ev.Preempt, ev.Resume, ev.SendPlan]
    assert actions[1:3] == [ev.Preempt(G, "a", 20), ev.Resume(G, "a", held_tokens=30)]
    assert actions[3].plan.admit == (Grant("a", 50),)


def test_unclaimed_orphan_is_cancelled_after_adopt_s() -> None:
    s = state()
    run_step(s, back(held("a"), held("b")), 0.0)
    run_step(s, ev.Submitted(G, again("a")), 1.0)
    assert run_step(s, ev.Tick(), ADOPT_S - 0.1) == []
    assert s.next_deadline() == ADOPT_S
    [plan] = run_step(s, ev.Tick(), ADOPT_S)
    assert plan.plan.cancel == ("b",)
    assert numbers(s, "a") == RUNS
    assert s.next_deadline() == inf


def test_orphan_at_another_worker_is_cancelled_before_request_is_placed() -> None:
    s = state()
    run_step(s, back(held("a")), 0.0)
    run_step(s, ev.Submitted(G, again("a", at="")), 1.0)
    place, plan = run_step(s, ev.Forecasted((("a", certain(50)),)), 1.1)
    assert (type(place), place.worker_id) == (ev.Place, "w0")
    assert (plan.plan.cancel, plan.plan.admit) == (("a",), (Grant("a", 50),))
    assert s.workers["w0"].orphans == {}


def test_request_is_queued_when_its_worker_never_attaches() -> None:
    s = state()
    run_step(s, back(name="w1"), 0.0)
    run_step(s, ev.Submitted(G, again("a", delivered=18)), 1.0)
    run_step(s, ev.Forecasted((("a", certain(50)),)), 1.1)
    assert s.next_deadline() == 1.0 + ADOPT_S
    assert run_step(s, ev.Tick(), ADOPT_S + 0.9) == []
    preempt, place, plan = run_step(s, ev.Tick(), ADOPT_S + 1.0)
    assert preempt == ev.Preempt(G, "a", 18)  # the gateway sends the prompt there
    assert place == ev.Place(G, "a", "w1", "unix:/w1", queued_s=ADOPT_S + 1.0)
    assert plan.plan.admit == (Grant("a", 50),)


def test_request_is_queued_when_its_worker_attaches_without_it() -> None:
    s = state()
    run_step(s, ev.Submitted(G, again("a")), 1.0)
    run_step(s, ev.Forecasted((("a", certain(50)),)), 1.1)
    [preempt, place, _] = run_step(s, back(), 2.0)
    assert preempt == ev.Preempt(G, "a", 18)
    assert place == ev.Place(G, "a", "w0", "unix:/w0", queued_s=2.0)


def test_adoption_timer_of_earlier_submission_is_ignored() -> None:
    """The gateway submits the request twice: the row stays, the time changes."""
    s = state()
    run_step(s, back(name="w1"), 0.0)
    run_step(s, ev.Submitted(G, again("a")), 0.0)
    row = s.jobs["a"].row
    run_step(s, ev.Submitted("gateway#2", again("a")), 8.0)
    assert s.jobs["a"].row == row
    run_step(s, ev.Tick(), ADOPT_S)
    assert numbers(s, "a")["phase"] is RequestPhase.AWAITING_WORKER
    run_step(s, ev.Tick(), ADOPT_S + 8.0)
    assert numbers(s, "a")["home"] == "w1"


def test_request_running_elsewhere_is_cancelled_at_attaching_worker() -> None:
    s = state()
    run_step(s, worker("w1"), 0.0)
    admitted(s, request("a"), on="w1")
    [plan] = run_step(s, back(held("a")), 1.0)
    assert (plan.worker_id, plan.plan.cancel) == ("w0", ("a",))
    assert numbers(s, "a")["home"] == "w1"
    assert (
        report(s, 1, 2.0, progress=(RequestProgress("a", 33, 43),)) == []
    )  # the worker has not applied that plan yet
    assert report(s, 2, 2.0, finished=(Completion("a", 50, FinishReason.LENGTH),)) == []
    assert numbers(s, "a")["output"] == 0


def test_queued_request_without_home_is_adopted() -> None:
    s = state()
    submitted(s, request("a"))
    assert queued(s) == ["a"]
    assert run_step(s, back(held("a")), 1.0) == [ev.Resume(G, "a", held_tokens=30)]
    assert numbers(s, "a") == RUNS


def test_forecast_after_adoption_keeps_request_running() -> None:
    s = state("past-future")
    run_step(s, back(held("a")), 0.0)
    run_step(s, ev.Submitted(G, again("a")), 1.0)
    total = s.ledger.board.jobs.total
    assert total[s.jobs["a"].row] == 50  # max_tokens
    run_step(s, ev.Forecasted((("a", certain(30)),)), 1.1)
    assert total[s.jobs["a"].row] == 30 and numbers(s, "a")["phase"] is RequestPhase.RUNNING


def test_reconnected_gateway_continues_running_request() -> None:
    """The new stream attaches before the old one ends."""
    s = state()
    run_step(s, worker(), 0.0)
    admitted(s, request("a"))
    report(s, 1, 1.0, progress=(RequestProgress("a", 20, 30, 2),))
    assert run_step(s, ev.Submitted("gateway#2", again("a")), 2.0) == [
        ev.Resume("gateway#2", "a", held_tokens=30)
    ]
    assert run_step(s, ev.GatewayLost(G), 3.0) == []
    assert numbers(s, "a") == RUNS


@pytest.mark.parametrize("first", ["gateway", "worker"])
def test_request_naming_absent_worker_is_not_refused_for_model(first: str) -> None:
    """There are two models, and the worker of the other model attaches first."""
    s = state()
    other, ask = back(name="w1", model="other"), ev.Submitted(G, again("a"))
    for event in (ask, other) if first == "gateway" else (other, ask):
        assert not any(isinstance(a, ev.Refuse) for a in run_step(s, event, 0.0))
    assert run_step(s, back(held("a")), 5.0) == [ev.Resume(G, "a", held_tokens=30)]
    run_step(s, ev.Submitted(G, again("b", at="w9", model="gone")), 5.0)
    [_, refused] = run_step(s, ev.Tick(), 5.0 + ADOPT_S)
    assert refused == ev.Refuse(
        G,
        "b",
        Reject(RejectReason.NO_MODEL, "no worker serves the model 'gone'; known: demo, other"),
    )


def test_orphan_progress_is_kept_until_adoption() -> None:
    """The orphan continued, was evicted or ended before a gateway claimed it."""
    s = state()
    run_step(s, back(held("a"), held("b"), held("c")), 0.0)
    report(
        s,
        1,
        0.5,
        progress=(RequestProgress("a", 30, 40, 3),),
        evicted=(RequestProgress("b", 22, 0),),
        finished=(Completion("c", 50, FinishReason.LENGTH),),
    )
    s.step(ev.Submitted(G, again("a")), 1.0)
    assert numbers(s, "a") == RUNS | {"output": 30, "held": 40, "blocks": 3}
    s.step(ev.Submitted(G, again("b")), 1.0)
    assert (numbers(s, "b")["phase"], numbers(s, "b")["held"]) == (RequestPhase.QUEUED, 0)
    s.step(ev.Submitted(G, again("c")), 1.0)
    assert (numbers(s, "c")["phase"], numbers(s, "c")["home"]) == (RequestPhase.FORECASTING, "")


def test_orphans_keep_slots_and_blocks() -> None:
    s = state()
    view = WorkerView("w0", "unix:/w0", "demo", 160, 16, 3, 160)
    many = HeldRequest("a", 100, 50, 20, 120, 50, True, 8)
    run_step(s, ev.WorkerAttached("w0#1", view, (many, held("b"))), 0.0)
    waits(s, request("x", prompt=20))  # all ten blocks belong to the orphans
    report(s, 1, 1.0, finished=(Completion("a", 30, FinishReason.STOP),))
    assert list(s.workers["w0"].running) == ["x"]
    admitted(s, request("y"), 1.0)
    waits(s, request("z"), 1.0)  # three slots, one of them the orphan's
    run_step(s, ev.Tick(), ADOPT_S)
    assert list(s.workers["w0"].running) == ["x", "y", "z"]


# Another worker with the same name


def test_worker_with_same_name_displaces_first_and_requeues_its_jobs() -> None:
    s = state()
    run_step(s, worker(), 0.0)
    admitted(s, request("a"))
    report(s, 1, 1.0, progress=(RequestProgress("a", 9, 19),))
    displace, preempt, place, plan = run_step(s, worker(link="#2"), 2.0)
    assert displace == ev.Displace("w0#1", "w0")
    assert preempt == ev.Preempt(G, "a", 9)
    assert place == ev.Place(G, "a", "w0", "unix:/w0", queued_s=0.0)
    assert (plan.link, plan.plan.seq, plan.plan.admit) == ("w0#2", 1, (Grant("a", 50),))


def test_reports_of_displaced_worker_are_ignored() -> None:
    s = state()
    run_step(s, worker(), 0.0)
    admitted(s, request("a"))
    run_step(s, worker(link="#2"), 1.0)
    done = (Completion("a", 30, FinishReason.STOP),)
    assert report(s, 1, 1.5, finished=done) == []
    assert run_step(s, ev.WorkerLost("w0#1", "w0"), 2.0) == []
    assert s.workers["w0"].link == "w0#2" and list(s.workers["w0"].running) == ["a"]


def test_worker_reattached_before_old_stream_ended_keeps_requests() -> None:
    s = state()
    run_step(s, worker(), 0.0)
    admitted(s, request("a"))
    assert run_step(s, back(held("a"), link="#2"), 1.0) == [
        ev.Displace("w0#1", "w0"),
        ev.Preempt(G, "a", 0),
        ev.Resume(G, "a", held_tokens=30),
    ]
    assert numbers(s, "a") == RUNS


def test_reused_request_ids_leak_no_rows() -> None:
    s = state()
    for turn in range(300):
        run_step(s, back(held("a"), link=f"#{turn}"), float(turn))
        run_step(s, ev.Submitted(G, again("a")), float(turn))
        run_step(s, ev.Forecasted((("a", certain(50)),)), float(turn))
        run_step(s, ev.Cancelled(G, "a", FinishReason.CANCELLED, 0), float(turn))
    board = s.ledger.board
    assert len(board.phase) == 256 and not board.phase.any() and len(board.forecasts) == 1
