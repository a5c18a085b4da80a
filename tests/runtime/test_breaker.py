"""The circuit breaker as a transcript: each event, the resulting phase, and the pause."""

from collections.abc import Callable

import pytest

from services.runtime.network.backoff import Backoff
from services.runtime.network.breaker import Breaker, BreakerPhase

NEW = Breaker(failures_max=3, pauses=Backoff(0.5, 2.0))

TURNS: dict[str, Callable[[Breaker, float], Breaker]] = {
    "called": lambda breaker, _: breaker.called(),
    "answered": lambda breaker, _: breaker.answered(),
    "failed": Breaker.failed,
    "late": Breaker.late,
}
TRANSCRIPTS = {
    "some failures in a row open it, an answer between them does not count": """
        0.0 failed   closed    0
        0.1 failed   closed    0
        0.2 answered closed    0
        0.3 failed   closed    0
        0.4 failed   closed    0
        0.5 failed   open      0.5
    """,
    "one probe after each pause, the pauses double up to the longest": """
        0.0 failed   closed    0
        0.0 failed   closed    0
        0.0 failed   open      0.5
        0.5 called   half_open 0
        0.5 failed   open      1.0
        1.5 called   half_open 0
        1.5 failed   open      2.0
        3.5 called   half_open 0
        3.5 failed   open      2.0
        5.5 called   half_open 0
        5.5 answered closed    0
        5.6 failed   closed    0
    """,
    "a late answer shows that it is up: the next probe is soon, and no request waits": """
        0.0 failed   closed    0
        0.1 late     closed    0
        0.2 failed   closed    0
        0.3 failed   open      0.5
        0.8 called   half_open 0
        0.8 failed   open      1.0
        1.8 called   half_open 0
        1.8 failed   open      2.0
        1.9 late     open      0.5
        2.4 called   half_open 0
        2.4 failed   open      1.0
        3.3 late     open      0.1
        3.4 called   half_open 0
        3.4 answered closed    0
    """,
}


@pytest.mark.parametrize("name", TRANSCRIPTS)
def test_breaker_transitions(name: str) -> None:
    breaker = NEW
    for line in TRANSCRIPTS[name].split("\n")[1:-1]:
        at, what, phase, wait_s = line.split()
        now = float(at)
        breaker = TURNS[what](breaker, now)
        assert breaker.phase is BreakerPhase(phase)
        assert breaker.wait_s(now) == pytest.approx(float(wait_s))


def test_closed_breaker_needs_no_probe() -> None:
    assert NEW.called() == NEW
    assert NEW.wait_s(0.0) == 0
