"""Measures the latencies of the control plane from the steps of a scheduler.

round     Each round's event has the time of the round before. Non-negative least squares give the
          time of a round and of a request in it.
wake      From the time at which a round is due to its start: it is due once something has changed
          and the scheduler has rested after the round before.
hop       From a round that places a request to the step that computes its prompt: a round, two
          messages for the prompt, and one for the report that dates the step. The mean: a prompt
          that arrives within a step is dated to its middle, which is right on average only.
forecast  From a submission to its first forecast.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

import numpy as np
from scipy.optimize import nnls

from services.scheduler.core import events as ev
from services.scheduler.core.phases import RequestPhase, Transition
from simulator.engine.settings import Timing

DEFAULT = Timing()
CHANGES = ev.Submitted | ev.Forecasted | ev.Refreshed | ev.Reported
MIN_SAMPLES = 8  # of a latency; below, the default is used
HOPS = 3  # messages from the round that places a request to the report that dates its step


@dataclass
class ControlPlaneClock:
    """Follows the steps of one scheduler. O(1) per transition."""

    _live: int = 0  # requests
    _round_requests: int = 0  # in the last round
    _round_s: float = inf  # when the last round started
    _changed_s: float = inf  # the first change after it
    _late_s: list[float] = field(default_factory=list)
    _rounds: list[tuple[float, int]] = field(default_factory=list)  # seconds, requests
    _asked_s: dict[str, float] = field(default_factory=dict)
    _forecast_s: list[float] = field(default_factory=list)

    def observe(self, step: ev.Step) -> None:
        now = step.now
        match step.event:
            case ev.Round(previous_s=previous_s):
                self._on_round(previous_s, now)
            case ev.Submitted(request=request):
                self._asked_s.setdefault(request.request_id, now)
            case ev.Forecasted(forecasts=forecasts):
                asked = (self._asked_s.pop(name, None) for name, _ in forecasts)
                self._forecast_s += [now - asked_s for asked_s in asked if asked_s is not None]
            case _:
                pass
        if isinstance(step.event, CHANGES):
            self._changed_s = min(self._changed_s, now)
        self._live += sum(map(_change, step.transitions))

    def _on_round(self, previous_s: float, now: float) -> None:
        if previous_s:
            self._rounds.append((previous_s, self._round_requests))
            rested_s = self._round_s + previous_s / DEFAULT.round_share
            if (due_s := max(rested_s, self._changed_s)) < inf:
                self._late_s.append(now - due_s)
        self._round_requests, self._round_s, self._changed_s = self._live, now, inf

    def timing(self, placements_s: Sequence[float]) -> Timing:
        """Returns the measured latencies; the default ones where there are too few samples.
        `placements_s` are the times from rounds to the arrivals of prompts that they placed, one
        message later."""
        round_s, round_job_s = self._round_costs()
        took_s = round_s + round_job_s * self._mean_requests()
        hop_s = DEFAULT.hop_s
        if len(placements_s) >= MIN_SAMPLES:
            hop_s = max(0.0, (float(np.mean(placements_s)) - took_s) / HOPS)
        return Timing(
            hop_s=hop_s,
            forecast_s=_median(self._forecast_s, DEFAULT.forecast_s),
            round_s=round_s,
            round_job_s=round_job_s,
            wake_s=max(0.0, _median(self._late_s, DEFAULT.wake_s)),
        )

    def _mean_requests(self) -> float:
        return float(np.mean([requests for _, requests in self._rounds])) if self._rounds else 0.0

    def _round_costs(self) -> tuple[float, float]:
        if len(self._rounds) < MIN_SAMPLES:
            return DEFAULT.round_s, DEFAULT.round_job_s
        took_s, requests = np.array(self._rounds).T
        work = np.stack([np.ones(len(took_s)), requests], axis=1)
        (round_s, round_job_s), _ = nnls(work, took_s)
        return float(round_s), float(round_job_s)


def _change(transition: Transition) -> int:
    """Returns the change of the number of live requests."""
    none = RequestPhase.NONE
    return (transition.after is not none) - (transition.before is not none)


def _median(values: Sequence[float], default: float) -> float:
    return float(np.median(values)) if len(values) >= MIN_SAMPLES else default
