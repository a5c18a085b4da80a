"""TTFT promises: tables, a simple reference, and the share kept in simulated loads."""

from collections import deque
from collections.abc import Callable, Iterable
from itertools import cycle
from math import ceil, inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.sessions.ttft_promises import FLOOR_S, GAIN, MIN_ERRORS, SHARE, WINDOW, TtftPromises

SEEDS = (1, 2, 3)


def calibrate(expected_s: float, actual_s: Iterable[float]) -> TtftPromises:
    """Promises that have learned first tokens after these times, each expected at `expected_s`."""
    promises = TtftPromises()
    for each_s in actual_s:
        promises.learn(expected_s, promises.promise(expected_s), each_s)
    return promises


@pytest.mark.parametrize(("expected_s", "promised_s"), [(0.0, 0.02), (0.01, 0.04), (1.0, 2.02)])
def test_uncalibrated_promise_is_twice_the_expectation_plus_20_ms(
    expected_s: float, promised_s: float
) -> None:
    assert TtftPromises().promise(expected_s) == pytest.approx(promised_s)
    assert calibrate(1.0, [9.0] * (MIN_ERRORS - 1)).promise(expected_s) == pytest.approx(promised_s)


def calibrate_window(kept: int = 0, missed: int = 0) -> TtftPromises:
    """Promises with a full window of errors: 1 to 256 s, in some order, each expected after 1 s.
    Nine in ten promises are kept, then the last `kept` and none of the last `missed`."""
    promises, actual_s = TtftPromises(), cycle(range(WINDOW))
    enough = [True] * MIN_ERRORS + ([True] * 9 + [False]) * 24 + [True] * kept + [False] * missed
    for each in enough:
        promises.learn(1.0, inf if each else 0.0, 1.0 + next(actual_s) * 7 % WINDOW)
    return promises


def test_promise_after_twenty_errors_covers_all_but_one() -> None:
    """0.9 x 21, rounded up: the 19th."""
    assert calibrate(1.0, range(1, 21)).promise(1.0) == pytest.approx(19)
    assert calibrate(1.0, range(20, 0, -1)).promise(1.0) == pytest.approx(19)


@pytest.mark.parametrize(
    ("kept", "missed", "place"),
    [
        (0, 0, 232),  # 0.9 x 257 = 231.3
        (100, 0, 219),  # each subtracts 0.0005 from the level: 0.85 x 257 = 218.45
        (0, 10, 243),  # each adds 0.0045: 0.945 x 257 = 242.9
        (91, 9, 231),  # 0.895 x 257 = 230.02
        (0, 300, 256),  # the maximum of the window
        (2000, 0, 129),  # 0.5 x 257 = 128.5: the lower bound of the level
    ],
)
def test_promise_covers_a_level_of_the_window_that_follows_kept_promises(
    kept: int, missed: int, place: int
) -> None:
    assert calibrate_window(kept, missed).promise(1.0) == pytest.approx(place)


@pytest.mark.parametrize(
    ("expected_s", "promised_s"),
    [(0.0, 0.04), (0.08, 0.28), (0.98, 2.98), (9.98, 29.98)],
)
def test_promise_error_is_a_ratio_with_20_ms_on_both_sides(
    expected_s: float, promised_s: float
) -> None:
    """With 20 ms added to both, 0.1 s was expected and 0.3 s was measured."""
    assert calibrate(0.08, [0.28] * MIN_ERRORS).promise(expected_s) == pytest.approx(promised_s)


def test_promises_become_earlier_after_early_tokens_but_never_negative() -> None:
    promises = calibrate(0.98, [0.23] * MIN_ERRORS)
    assert promises.promise(1.98) == pytest.approx(0.48)
    assert promises.promise(0.0) == 0.0


def test_promise_errors_leave_the_window() -> None:
    promises = calibrate(1.0, [9.0] * WINDOW)
    for _ in range(WINDOW):
        assert promises.promise(1.0) == pytest.approx(9.0)
        promises.learn(1.0, 0.0, 2.0)  # all missed: the promise is the maximum of the window
    assert promises.promise(1.0) == pytest.approx(2.0)


SECONDS = st.floats(0, 1e4)


@given(st.lists(st.tuples(SECONDS, SECONDS), max_size=3 * MIN_ERRORS), SECONDS, st.integers(1, 6))
def test_promise_margin_equals_a_freshly_sorted_window(
    past: list[tuple[float, float]], next_s: float, times: int
) -> None:
    promises, last, level = TtftPromises(), deque[float](maxlen=WINDOW), SHARE
    for expected_s, actual_s in past * times:
        promised_s = promises.promise(expected_s)
        if len(last) >= MIN_ERRORS:
            level = min(1.0, max(0.5, level + GAIN * (SHARE - (actual_s <= promised_s))))
        promises.learn(expected_s, promised_s, actual_s)
        last.append((actual_s + FLOOR_S) / (expected_s + FLOOR_S))
    factor = 2.0
    if len(last) >= MIN_ERRORS:
        factor = sorted(last)[min(len(last), ceil((len(last) + 1) * level)) - 1]
    assert promises.promise(next_s) == max(0.0, factor * (next_s + FLOOR_S) - FLOOR_S)


Load = Callable[
    [np.random.Generator, int], tuple[float, float]
]  # expected and actual seconds of one request


def noisy(rng: np.random.Generator, at: int) -> tuple[float, float]:
    """Late by a factor and a network delay; one in fifty is lost and repeated."""
    expected_s = float(rng.lognormal(-2.0, 1.5))
    lost_s = 2.0 if rng.random() < 0.02 else 0.0
    return expected_s, expected_s * float(rng.lognormal(0.6, 0.7)) + 0.01 + lost_s


def network_bound(rng: np.random.Generator, at: int) -> tuple[float, float]:
    """A very short expectation; the network delay dominates."""
    return 0.002, 0.002 + float(rng.exponential(0.008))


def early(rng: np.random.Generator, at: int) -> tuple[float, float]:
    expected_s = float(rng.uniform(1.0, 20.0))
    return expected_s, expected_s * float(rng.uniform(0.1, 0.6))


def in_waves(rng: np.random.Generator, at: int) -> tuple[float, float]:
    """The load rises and falls every 500 requests, and the error with it."""
    expected_s = float(rng.lognormal(-1.0, 1.0))
    scale = 1.5 + np.sin(at * 2 * np.pi / 500)
    return expected_s, expected_s * (1.0 + float(rng.exponential(scale)))


def worsening(rng: np.random.Generator, at: int) -> tuple[float, float]:
    """From the middle on, everything is five times as slow."""
    expected_s, actual_s = noisy(rng, at)
    return expected_s, actual_s * (5.0 if at >= 2000 else 1.0)


def kept_share(load: Load, seed: int, count: int = 4000, within: int = 30) -> float:
    """The share of `count` promises that are kept. Outcomes are learned in random order, with up to
    `within` promises open."""
    rng, promises = np.random.default_rng(seed), TtftPromises()
    open_promises: list[tuple[float, float, float]] = []
    kept = 0
    for at in range(count):
        expected_s, actual_s = load(rng, at)
        promised_s = promises.promise(expected_s)
        kept += actual_s <= promised_s
        open_promises.append((expected_s, promised_s, actual_s))
        if len(open_promises) > within:
            promises.learn(*open_promises.pop(int(rng.integers(len(open_promises)))))
    return kept / count


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("load", [noisy, network_bound, early, in_waves, worsening])
def test_about_nine_in_ten_promises_are_kept(load: Load, seed: int) -> None:
    assert kept_share(load, seed) == pytest.approx(SHARE, abs=0.01)


@pytest.mark.parametrize("seed", SEEDS)
def test_plain_expectations_without_margin_are_mostly_missed(seed: int) -> None:
    """Without a margin, most first tokens would be late."""
    rng = np.random.default_rng(seed)
    pairs = [noisy(rng, at) for at in range(1000)]
    assert sum(actual_s <= expected_s for expected_s, actual_s in pairs) < 300
