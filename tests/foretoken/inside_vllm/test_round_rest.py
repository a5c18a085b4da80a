"""Rounds take their share of the time."""

import time
from functools import partial

import pytest

from foretoken.vllm.round_rest import RoundRest


@pytest.mark.parametrize(
    ("after_s", "over"),
    [
        pytest.param(0.0, False, id="right after a round that computed for 10 of 30 ms"),
        pytest.param(0.085, False, id="it rests nine times as long"),
        pytest.param(0.095, True, id="after the rest"),
    ],
)
def test_a_rest_is_in_proportion(
    after_s: float, over: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for clock, readings in {"monotonic": [1.0, 1.03], "thread_time": [0.5, 0.51]}.items():
        times = iter(readings)
        monkeypatch.setattr(f"foretoken.vllm.round_rest.time.{clock}", partial(next, times))
    took_s: list[float] = []
    rest = RoundRest(share=0.1, observe=took_s.append)
    assert rest.is_over(0.0)
    assert rest.timed(lambda: "plan") == "plan"
    assert rest.is_over(1.03 + after_s) == over
    assert took_s == [pytest.approx(0.03)]


def test_a_whole_core_never_rests() -> None:
    rest = RoundRest(share=1.0, observe=lambda _: None)
    rest.timed(lambda: None)
    assert rest.is_over(time.monotonic())
