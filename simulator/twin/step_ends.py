"""When the steps of a worker ended, from its reports: each token then has the time of its step.

A report carries the durations of the steps since the report before, and the last of them ended when
it was sent. Between two steps the worker needs host time, which the durations do not contain. A
report may be handled late, so the next ones correct it: while the worker has work, a report's last
step ended at the latest when the next report's steps began.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from services.core import Report
from services.costs import StepTiming
from services.estimator.windows import SwapRates
from services.forecast import Floats
from services.scheduler.core.phases import RequestPhase, Transition


class Interval(NamedTuple):
    """The steps of one report, which came at `at_s`. `busy`: the worker has had work ever since the
    report before."""

    at_s: float
    steps: int
    device_s: float
    busy: bool


@dataclass(slots=True)
class WorkerSteps:
    """The steps of one worker, and the reports that brought them; `swaps` are its KV copies."""

    timings: list[StepTiming] = field(default_factory=list)
    intervals: list[Interval] = field(default_factory=list)
    swaps: SwapRates = field(default_factory=SwapRates)
    _running: set[str] = field(default_factory=set)
    _busy: bool = False  # since the last report

    def observe(self, transition: Transition) -> None:
        """Follows which requests run here. O(1)."""
        if transition.after is RequestPhase.RUNNING:
            self._running.add(transition.request_id)
        else:
            self._running.discard(transition.request_id)
        self._busy &= bool(self._running)

    def on_report(self, report: Report, now: float) -> None:
        """Adds the report's steps. Call it before the transitions that the report caused.
        O(steps)."""
        if report.timings:
            device_s = sum(timing.elapsed_s for timing in report.timings)
            self.intervals.append(Interval(now, len(report.timings), device_s, self._busy))
            self.timings += report.timings
        for swap in report.swaps:
            self.swaps.add(swap)
        self._busy = bool(report.timings and self._running)

    @property
    def host_s(self) -> float:
        """Mean time between two steps while the worker has work, at least 0."""
        wall_s = device_s = 0.0
        steps = 0
        for before, interval in zip(self.intervals, self.intervals[1:], strict=False):
            if interval.busy:
                wall_s += interval.at_s - before.at_s
                device_s += interval.device_s
                steps += interval.steps
        return max(0.0, wall_s - device_s) / max(1, steps)

    def ends_s(self) -> Floats:
        """Returns the end of each step in `timings` plus one message to the scheduler. O(steps)."""
        sent_s, host_s = self._sent_s(), self.host_s
        elapsed_s = self._elapsed_s()
        ends_s = np.zeros(len(elapsed_s))
        last = len(elapsed_s)
        for place in range(len(self.intervals) - 1, -1, -1):
            _, steps, device_s, busy = self.intervals[place]
            between_s = host_s
            if busy:
                between_s = max(0.0, sent_s[place] - sent_s[place - 1] - device_s) / steps
            later_s = elapsed_s[last - steps + 1 : last] + between_s
            ends_s[last - steps : last] = sent_s[place]
            ends_s[last - steps : last - 1] -= np.cumsum(later_s[::-1])[::-1]
            last -= steps
        return ends_s

    def arrivals_s(self) -> Floats:
        """Returns for each step the mean time at which a command arrives that takes effect in it,
        plus one message, as `ends_s`: the middle between the starts of the step before and of this
        one, or its start after an idle time. O(steps)."""
        starts_s = self.ends_s() - self._elapsed_s()
        before_s = np.concatenate([starts_s[:1], starts_s[:-1]])
        firsts = np.cumsum([0, *(interval.steps for interval in self.intervals)])[:-1]
        idle = firsts[[not interval.busy for interval in self.intervals]]
        before_s[idle] = starts_s[idle]
        arrivals_s: Floats = (before_s + starts_s) / 2
        return arrivals_s

    def _elapsed_s(self) -> Floats:
        return np.array([timing.elapsed_s for timing in self.timings], float)

    def _sent_s(self) -> list[float]:
        """Returns when each report would have come without delays."""
        sent_s: list[float] = []
        latest_s = np.inf
        for interval in reversed(self.intervals):
            sent_s.append(min(interval.at_s, latest_s))
            latest_s = sent_s[-1] - interval.device_s if interval.busy else np.inf
        return sent_s[::-1]
