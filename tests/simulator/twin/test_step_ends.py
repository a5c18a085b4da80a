"""Ends of steps from reports, worked out by hand."""

import pytest

from services.core import Report
from services.costs import StepTiming
from services.scheduler.core.phases import RequestPhase, Transition, TransitionCause
from simulator.twin.step_ends import WorkerSteps


def change(request_id: str, after: RequestPhase) -> Transition:
    cause = TransitionCause.PLACED if after is RequestPhase.RUNNING else TransitionCause.FINISHED
    before = RequestPhase.QUEUED if after is RequestPhase.RUNNING else RequestPhase.RUNNING
    return Transition(request_id, before, after, cause, 0.0, "w")


def report(*elapsed_s: float) -> Report:
    return Report(1, 1, timings=tuple(StepTiming(0, 1, 10, each_s) for each_s in elapsed_s))


def running() -> WorkerSteps:
    steps = WorkerSteps()
    steps.observe(change("a", RequestPhase.RUNNING))
    return steps


def test_steps_of_a_busy_worker_share_its_host_time():
    """Reports at 10 s and 13 s. The second has steps of 0.5 s, 0.5 s and 1 s: of 3 s, 1 s is host
    time, a third for each."""
    steps = running()
    steps.on_report(report(1.0), 10.0)
    steps.on_report(report(0.5, 0.5, 1.0), 13.0)
    assert steps.host_s == pytest.approx(1 / 3)
    assert steps.ends_s().tolist() == pytest.approx([10.0, 10 + 5 / 6, 10 + 10 / 6, 13.0])


def test_late_report_is_corrected_by_the_next_one():
    """The second report came at 14 s, but the steps of the third one began at 12 s at the latest:
    its 2 s of steps ended at 14.1 s."""
    steps = running()
    steps.on_report(report(1.0), 10.0)
    steps.on_report(report(1.0, 1.0), 14.0)
    steps.on_report(report(1.0, 1.0), 14.1)
    ends_s = steps.ends_s().tolist()
    assert ends_s[2] == pytest.approx(12.1)
    assert ends_s[4] == pytest.approx(14.1)


def test_idle_time_counts_as_neither_host_time_nor_delay():
    """The worker ran out of requests after the first report; the second one's step began late."""
    steps = running()
    steps.on_report(report(1.0), 10.0)
    steps.observe(change("a", RequestPhase.NONE))
    steps.observe(change("b", RequestPhase.RUNNING))
    steps.on_report(report(2.0), 50.0)
    steps.on_report(report(2.0), 52.5)
    assert steps.host_s == pytest.approx(0.5)
    assert steps.ends_s().tolist() == [10.0, 50.0, 52.5]
    # A command takes effect in the step that it woke up, or on average half a step earlier.
    assert steps.arrivals_s().tolist() == pytest.approx([9.0, 48.0, (48.0 + 50.5) / 2])


def test_report_without_steps_ends_the_busy_time():
    steps = running()
    steps.on_report(report(1.0), 10.0)
    steps.on_report(report(), 11.0)
    steps.on_report(report(1.0), 20.0)
    assert steps.host_s == 0.0
    assert len(steps.intervals) == 2
