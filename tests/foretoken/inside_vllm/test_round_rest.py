"""Rounds take their share of the time."""

import time

import pytest

from foretoken.vllm.round_rest import RoundRest


@pytest.mark.parametrize(
    ("after_s", "over"),
    [
        pytest.param(0.0, False, id="right after a round that waited for 10 ms"),
        pytest.param(0.085, False, id="it rests nine times as long"),
        pytest.param(0.095, True, id="after the rest"),
    ],
)
def test_a_rest_is_in_proportion_to_the_time_of_a_round(
    after_s: float, over: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([1.0, 1.01])
    monkeypatch.setattr("foretoken.vllm.round_rest.time.monotonic", lambda: next(times))
    took_s: list[float] = []
    rest = RoundRest(share=0.1, observe=took_s.append)
    assert rest.is_over(0.0)
    assert rest.timed(lambda: "plan") == "plan"
    assert rest.is_over(1.01 + after_s) == over
    assert took_s == [pytest.approx(0.01)]


def test_a_share_of_one_never_rests() -> None:
    rest = RoundRest(share=1.0, observe=lambda _: None)
    rest.timed(lambda: None)
    assert rest.is_over(time.monotonic())
