"""A step lasts from the end of the one before it, or from its own begin if that is later."""

from foretoken.vllm.step_clock import StepClock
from services.costs import StepTiming


def test_one_step_at_a_time() -> None:
    clock = StepClock(kv_tokens=1_000)
    clock.began([1, 1, 30], 0.5, 1.0)
    assert clock.ended(1.25) == StepTiming(30, 2, 500, 0.25)
    clock.began([1, 1, 1], 0.5, 2.0)
    assert clock.ended(2.5) == StepTiming(0, 3, 500, 0.5)


def test_two_steps_in_flight_share_no_time() -> None:
    clock = StepClock(kv_tokens=1_000)
    clock.began([1], 0.1, 1.0)
    clock.began([1], 0.1, 1.125)
    first, second = clock.ended(2.0), clock.ended(3.0)
    assert first is not None
    assert second is not None
    assert (first.elapsed_s, second.elapsed_s) == (1.0, 1.0)


def test_a_step_without_tokens_is_not_timed() -> None:
    clock = StepClock(kv_tokens=1_000)
    clock.began([], 0.0, 1.0)
    assert clock.ended(2.0) is None
    assert clock.ended(3.0) is None
