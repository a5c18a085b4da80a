"""The time by which a client is promised its first token: the scheduler's expectation plus a
calibrated margin. Pure.

The scheduler's expectation assumes that no later request arrives, and describes the worker's side.
Its error is only visible at the client, so the margin is learned here by conformal prediction: the
next promise allows for the error that SHARE of the last errors do not exceed. Errors come in waves
with the load, and a window of them lags behind each wave. The quantile level therefore follows the
share of promises kept: adaptive conformal inference (Gibbs and Candès, "Adaptive Conformal
Inference Under Distribution Shift", NeurIPS 2021, Eq. 2).
"""

from bisect import bisect_left, insort
from collections import deque
from math import ceil

SHARE = 0.9  # of promises to keep
WINDOW = 256  # newest errors that count
MIN_ERRORS = 20  # below, UNCALIBRATED applies
FLOOR_S = 0.02  # added to both sides of a ratio: constant overheads are not proportional
UNCALIBRATED = 2.0  # expectation x 2 + 20 ms
GAIN = 0.005  # change of the level per promise
LEVELS = (0.5, 1.0)  # bounds of the level: the window has nothing above its maximum


class TtftPromises:
    """The promises of one gateway. About SHARE of the first tokens are sent within their promise.

    The share holds in the long run over all requests: not for each length of wait separately, and
    not in the first moments of a new kind of load. Before MIN_ERRORS a promise is a guess. An error
    is the ratio of actual to expected time, each plus FLOOR_S, so that short and long waits
    calibrate each other. A promise may be earlier than the expectation.

    A promise is O(1). Learning is O(log n), plus a move within n numbers.
    """

    def __init__(self) -> None:
        self._errors: deque[float] = deque()  # oldest first
        self._sorted: list[float] = []  # the same errors
        self._level = SHARE  # the quantile of the errors that the next promise allows for

    def promise(self, expected_s: float) -> float:
        """Seconds from arrival by which the first token is promised."""
        return max(0.0, self._margin() * (expected_s + FLOOR_S) - FLOOR_S)

    def learn(self, expected_s: float, promised_s: float, actual_s: float) -> None:
        """A first token was sent `actual_s` after arrival, or a choice ended without one then,
        later than promised."""
        if len(self._sorted) >= MIN_ERRORS:  # an uncalibrated promise does not test the level
            level = self._level + GAIN * (SHARE - (actual_s <= promised_s))
            self._level = min(max(level, LEVELS[0]), LEVELS[1])
        error = (actual_s + FLOOR_S) / (expected_s + FLOOR_S)
        self._errors.append(error)
        insort(self._sorted, error)
        if len(self._errors) > WINDOW:
            del self._sorted[bisect_left(self._sorted, self._errors.popleft())]

    def _margin(self) -> float:
        """The ceil((n + 1) · level)-th smallest of n errors: a further error is equally likely to
        fall into each of the n + 1 gaps, so it is no larger with at least that probability."""
        count = len(self._sorted)
        if count < MIN_ERRORS:
            return UNCALIBRATED
        return self._sorted[min(count, ceil((count + 1) * self._level)) - 1]
