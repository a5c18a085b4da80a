"""Step times from the arrivals of tokens: a hand-worked interval, and an engine as oracle."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.costs import StepTiming
from services.worker.backend.pace import Pace


def test_alone_prompt_is_a_prefill_step() -> None:
    pace = Pace()
    pace.on_sent("a", 100, 1.0)
    pace.on_tokens("a", 1, 1.5)
    assert pace.end_interval(2.0) == [StepTiming(100, 0, 100, 0.5)]


def test_prompt_beside_others_is_no_step_of_its_own() -> None:
    pace = Pace()
    pace.on_sent("a", 100, 1.0)
    pace.on_sent("b", 100, 1.1)
    pace.on_tokens("a", 1, 1.5)
    pace.on_tokens("b", 1, 1.6)
    assert pace.end_interval(2.0) == []


def test_interval_is_a_mean_step() -> None:
    pace = Pace()
    for name in "ab":
        pace.on_sent(name, 10, 0.0)
    for name in "ab":
        pace.on_tokens(name, 1, 0.5)
    assert pace.end_interval(1.0) == []  # both began within it
    for step in range(10):  # 10 steps of 0.1 s; c joins in the last 5
        for name in "ab" if step < 5 else "abc":
            pace.on_tokens(name, 1, 1.1 + step / 10)
    # 10 steps; 25 tokens; c's prompt is unknown here; contexts 21 + 21 + 5
    (timing,) = pace.end_interval(2.0)
    assert (timing.prefill_tokens, timing.decode_seqs, timing.context_tokens) == (0, 2, 47)
    assert timing.elapsed_s == pytest.approx(0.1)


def test_ended_requests_and_short_intervals_give_nothing() -> None:
    pace = Pace()
    pace.on_sent("a", 10, 0.0)
    pace.on_sent("b", 10, 0.0)
    pace.on_tokens("a", 1, 0.5)
    pace.end_interval(1.0)
    pace.on_tokens("a", 3, 1.5)  # fewer than 4 steps
    assert pace.end_interval(2.0) == []
    pace.on_tokens("a", 9, 2.5)
    pace.on_ended("a")
    assert pace.end_interval(3.0) == []


@given(st.integers(1, 20), st.integers(4, 40), st.floats(0.001, 1.0))
def test_equal_steps_are_found_again(seqs: int, steps: int, step_s: float) -> None:
    pace, now = Pace(), 0.0
    for number in range(seqs):
        pace.on_sent(str(number), 8, now)
        pace.on_tokens(str(number), 1, now)
    pace.end_interval(now)
    for _ in range(steps):
        now += step_s
        for number in range(seqs):
            pace.on_tokens(str(number), 1, now)
    (timing,) = pace.end_interval(now)
    assert (timing.prefill_tokens, timing.decode_seqs) == (0, seqs)
    assert timing.context_tokens == seqs * (8 + 1 + steps)
    assert timing.elapsed_s == pytest.approx(step_s)
