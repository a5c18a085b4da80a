"""Workers that fall silent: suspicion, and their requests at other workers."""

from math import inf
from typing import Any

from services.core import Completion, FinishReason, Report, RequestProgress
from services.costs import CostModel
from services.scheduler.core import events as ev
from services.scheduler.core.failures.suspicion import (
    CHECK_S,
    MAX_TURN_S,
    STEADY_S,
    Silence,
    SuspicionLimits,
)
from tests.scheduler.state_driver import admitted, report, request, run_step, state, worker

LIMITS = SuspicionLimits(3.0, 3.0)


def after(
    silence: Silence, seconds: float, heard: bool, limits: SuspicionLimits = LIMITS
) -> Silence:
    """The state after turns of CHECK_S that together last so long."""
    for _ in range(round(seconds / CHECK_S)):
        silence = silence.after(CHECK_S, heard, limits)
    return silence


def test_silence_makes_a_worker_suspected_until_it_is_steadily_heard() -> None:
    silence = after(Silence(), 2.75, heard=False)
    assert not silence.suspected
    silence = after(silence, 0.25, heard=False)
    assert silence.suspected
    silence = silence.after(CHECK_S, True, LIMITS)
    assert silence.suspected
    assert not after(silence, STEADY_S, heard=True).suspected


def test_usual_gaps_lengthen_the_silence_that_is_suspected() -> None:
    busy = after(Silence(), 2.0, heard=False).after(CHECK_S, True, LIMITS)
    assert not after(busy, 6.0, heard=False).suspected
    assert after(busy, 7.0, heard=False).suspected
    hung = after(Silence(), 60.0, heard=False).after(CHECK_S, True, LIMITS)
    assert hung.gap_s == 0.0  # the end of a suspicion is no usual gap


def test_stopped_scheduler_suspects_no_worker() -> None:
    silence = Silence().after(3_600.0, False, LIMITS)
    assert silence == Silence(quiet_s=MAX_TURN_S)


def test_no_worker_is_suspected_without_a_limit() -> None:
    assert not after(Silence(), 100.0, False, SuspicionLimits()).suspected
    assert state().next_deadline() == inf


def two_workers() -> Any:
    """w0 runs a and b, w1 runs c."""
    s = state(suspect_s=3.0)
    for name in ("w0", "w1"):
        run_step(s, worker(name), 0.0)
        s.step(ev.Costed(name, CostModel(0.05, 0.01, 0.05, 0.0)), 0.0)
    for name in ("a", "b", "c"):
        run_step(s, ev.Submitted("g", request(name)), 0.0)
        run_step(s, ev.Forecasted(()), 0.0)
    while s.next_deadline() <= 0.1:
        run_step(s, ev.Tick(), 0.1)
    return s


def pass_silently(s: Any, until_s: float, silent: str = "w0") -> Any:
    """Time passes; the other worker says that it runs. Returns all actions."""
    actions: list[ev.Action] = []
    now = s.last_step.now
    for name in s.workers:
        run_step(s, ev.WorkerAlive(f"{name}#1", name), now)
    while now < until_s:
        now += CHECK_S
        for name in s.workers:
            if name != silent:
                actions += run_step(s, ev.WorkerAlive(f"{name}#1", name), now)
        actions += run_step(s, ev.Tick(), now)
    return actions


def placed(actions: Any) -> dict[str, str]:
    return {each.request_id: each.worker_id for each in actions if isinstance(each, ev.Place)}


def test_requests_of_a_silent_worker_continue_elsewhere_and_it_serves_again() -> None:
    s = two_workers()
    here = set(s.workers["w0"].running)
    assert here and set(s.workers["w1"].running)
    actions = pass_silently(s, 3.5)
    assert ev.Suspect("w0", True) in actions
    assert placed(actions) == dict.fromkeys(here, "w1")
    cancels = [e.plan.cancel for e in actions if isinstance(e, ev.SendPlan) and e.worker_id == "w0"]
    assert here == {name for cancel in cancels for name in cancel}
    admitted(s, request("later"), 4.0, on="w1")

    name = next(iter(here))  # what it says before it reads the plan has no effect
    stale = Report(
        1, 0, progress=(RequestProgress(name, 9, 19, 2),),
        finished=(Completion(name, 9, FinishReason.STOP),), free_blocks=60,
    )  # fmt: skip
    run_step(s, ev.Reported("w0#1", "w0", stale), 4.0)
    assert name in s.jobs and s.ledger.output(s.jobs[name]) == 0
    pass_silently(s, 6.0, silent="w1")
    assert s.workers["w0"].suspected
    report(s, 2, 6.1, on="w0", free_blocks=62)
    assert s.workers["w0"].takes_requests
    assert s.ledger.suspicions == 1


def test_worker_of_an_earlier_version_may_be_silent() -> None:
    s = two_workers()
    for second in range(1, 10):
        assert run_step(s, ev.Tick(), float(second)) == []
    assert s.workers["w0"].takes_requests


def test_requests_stay_at_a_silent_worker_if_others_have_no_room() -> None:
    s = two_workers()
    here = set(s.workers["w0"].running)
    report(s, 1, 0.2, on="w1", max_running=1, free_blocks=60)
    actions = pass_silently(s, 4.0)
    assert ev.Suspect("w0", True) in actions
    assert set(s.workers["w0"].running) == here and not placed(actions)
    assert not s.workers["w0"].fence_seq
