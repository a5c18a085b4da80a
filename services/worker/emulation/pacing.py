"""StepPacer: sleeps until modelled steps end.

Steps end at absolute times: a step begins when the one before it ended by the model, however late
the thread woke up. Errors of single sleeps therefore do not add up.
"""

import time
from typing import Protocol

# A thread that is later than this does not make up for it: a host that is slower than the device
# would otherwise compute ever faster steps once it has less to do.
CATCH_UP_S = 0.05


class Clock(Protocol):
    def now(self) -> float:
        """Seconds since some event."""

    def sleep_until(self, time_s: float) -> None:
        """Returns at this time, or at once if it has passed."""


class MonotonicClock:
    """The system's clock."""

    def now(self) -> float:
        return time.monotonic()

    def sleep_until(self, time_s: float) -> None:
        left_s = time_s - time.monotonic()
        if left_s > 0:
            time.sleep(left_s)


class StepPacer:
    """The times of one device: `begin`, then `end` of each step, and `rest` when nothing runs."""

    def __init__(self, clock: Clock):
        self._clock = clock
        self._resting = True
        self._free_s = 0.0  # when the device has completed everything

    def begin(self) -> float:
        """When the next step begins: now after a rest, else when the device became free."""
        now = self._clock.now()
        if self._resting:
            self._resting = False
            self._free_s = now
        self._free_s = max(self._free_s, now - CATCH_UP_S)
        return self._free_s

    def wait(self, until_s: float) -> float:
        """Sleeps while the device has nothing to compute before this time; returns it."""
        self._clock.sleep_until(until_s)
        self._free_s = until_s
        return until_s

    def end(self, elapsed_s: float) -> None:
        """Sleeps until the step has lasted so long."""
        self._free_s += elapsed_s
        self._clock.sleep_until(self._free_s)

    def rest(self) -> None:
        """Nothing can run: the next step begins when there is work."""
        self._resting = True
