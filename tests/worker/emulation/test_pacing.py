"""The times of modelled steps, by hand: sleeps end at absolute times."""

import pytest

from services.worker.emulation.pacing import CATCH_UP_S, REPORT_S, StepPacer
from tests.worker.emulation.virtual_time import VirtualClock


def test_late_wake_ups_do_not_add_up():
    clock = VirtualClock(time_s=5.0, late_s=0.002)
    pacer = StepPacer(clock)
    for _ in range(4):
        pacer.begin()
        pacer.end(0.010)
    assert clock.slept == pytest.approx([5.010, 5.020, 5.030, 5.040])
    assert clock.now() == pytest.approx(5.042)


def test_step_after_a_rest_begins_when_there_is_work():
    clock = VirtualClock()
    pacer = StepPacer(clock)
    pacer.begin()
    pacer.end(1.0)
    assert pacer.begin() == 1.0
    pacer.rest()
    clock.time_s = 1.5
    assert pacer.begin() == 1.5
    pacer.end(0.25)
    assert clock.slept == [1.0, 1.75]


def test_slow_host_catches_up_for_a_bounded_time():
    """A second passes between the end of a step and the begin of the next one."""
    clock = VirtualClock()
    pacer = StepPacer(clock)
    pacer.begin()
    pacer.end(1.0)
    clock.time_s = 2.0
    assert pacer.begin() == 2.0 - CATCH_UP_S


def test_machine_that_is_too_slow_is_reported(caplog: pytest.LogCaptureFixture):
    """The host takes 15 ms for each step of 10 ms: once it is so late that it does not sleep any
    more, a third of the time is lost. In the second half it keeps up."""
    clock = VirtualClock()
    pacer = StepPacer(clock, "h100")
    for late_s in (0.015, 0.0):
        caplog.clear()
        until_s = clock.now() + 2.5 * REPORT_S
        while clock.now() < until_s:
            pacer.begin()
            pacer.end(0.010)
            clock.time_s += late_s
        reported = [record.message for record in caplog.records]
        if late_s:
            assert len(reported) == 2
            assert "too slow to emulate h100: steps began late for 33 % of the last" in reported[1]
        else:
            assert not reported[1:]  # one span has both halves


def test_waiting_for_a_copy_delays_the_step_after_it():
    clock = VirtualClock()
    pacer = StepPacer(clock)
    pacer.begin()
    assert pacer.wait(0.3) == 0.3
    pacer.end(0.2)
    assert clock.slept == [0.3, 0.5]
