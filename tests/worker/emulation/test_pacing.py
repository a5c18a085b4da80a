"""The times of modelled steps, by hand: sleeps end at absolute times."""

import pytest

from services.worker.emulation.pacing import CATCH_UP_S, StepPacer
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


def test_waiting_for_a_copy_delays_the_step_after_it():
    clock = VirtualClock()
    pacer = StepPacer(clock)
    pacer.begin()
    assert pacer.wait(0.3) == 0.3
    pacer.end(0.2)
    assert clock.slept == [0.3, 0.5]
