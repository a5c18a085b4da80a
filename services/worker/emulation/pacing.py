"""StepPacer: sleeps until modelled steps end.

Steps end at absolute times: a step begins when the one before it ended by the model, however late
the thread woke up. Errors of single sleeps therefore do not add up.
"""

import logging
import time
from typing import Protocol

# A thread that is later than this does not make up for it: a host that is slower than the device
# would otherwise compute ever faster steps once it has less to do.
CATCH_UP_S = 0.05
# Lost time is reported for spans of this length in which it was more than this share.
REPORT_S, REPORTED_SHARE = 10.0, 0.1

log = logging.getLogger(__name__)


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


class LostTime:
    """The time that a device lost because its host was late, over spans of REPORT_S."""

    def __init__(self, now: float):
        self._since_s, self._lost_s = now, 0.0

    def add(self, lost_s: float, now: float) -> float:
        """Adds lost time. Returns the share of the span that was lost when a span ends, else 0."""
        self._lost_s += lost_s
        lasted_s = now - self._since_s
        if lasted_s < REPORT_S:
            return 0.0
        share = self._lost_s / lasted_s
        self._since_s, self._lost_s = now, 0.0
        return share


class StepPacer:
    """The times of one device: `begin`, then `end` of each step, and `rest` when nothing runs.

    Logs a warning if this machine is too slow for the device, which `name` names.
    """

    def __init__(self, clock: Clock, name: str = "device"):
        self._clock, self._name = clock, name
        self._lost = LostTime(clock.now())
        self._resting = True
        self._free_s = 0.0  # when the device has completed everything

    def begin(self) -> float:
        """When the next step begins: now after a rest, else when the device became free."""
        now = self._clock.now()
        if self._resting:
            self._resting = False
            self._free_s = now
        lost_s = now - CATCH_UP_S - self._free_s
        if lost_s > 0:
            self._free_s += lost_s
        share = self._lost.add(max(0.0, lost_s), now)
        if share > REPORTED_SHARE:
            log.warning(
                "this machine is too slow to emulate %s: steps began late for %.0f %% of the last "
                "%.0f s, which do not show how that hardware would serve",
                self._name,
                100 * share,
                REPORT_S,
            )
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
