"""Measures the latencies of the control plane from the steps of a scheduler.

round     After a round the scheduler rests, so that rounds take `round_share` of its time. Where
          an event has waited for the next round, the time between the two is the round's time
          over the share. Non-negative least squares give the time of a round and of a request.
hop       A plan for an idle worker is reported as applied at once: round, plan and report.
forecast  From a submission to its first forecast.
"""

from dataclasses import dataclass, field
from math import inf

import numpy as np
from scipy.optimize import nnls

from services.scheduler.core import events as ev
from simulator.engine.settings import Timing

DEFAULT = Timing()
MIN_SAMPLES = 8  # of a latency; below, the default is used
WAITED_S = 2e-4  # an event that precedes a round by more has waited for the rest to end


@dataclass
class ControlPlaneClock:
    """Follows the steps of one scheduler. O(1) per action."""

    _live: int = 0
    _round_s: float = -inf  # when the last round began
    _round_jobs: int = 0
    _dirty_s: float = inf  # the first event after it that asks for another
    _rounds: list[tuple[float, int]] = field(default_factory=list)  # seconds to the next, requests
    _plans: dict[tuple[str, int], tuple[float, int]] = field(default_factory=dict)
    _applied: list[tuple[float, int]] = field(default_factory=list)  # seconds, requests
    _asked_s: dict[str, float] = field(default_factory=dict)
    _forecast_s: list[float] = field(default_factory=list)

    def observe(self, step: ev.Step) -> None:
        now = step.now
        match step.event:
            case ev.Round():
                if now - self._dirty_s > WAITED_S:
                    self._rounds.append((now - self._round_s, self._round_jobs))
                self._round_s, self._round_jobs, self._dirty_s = now, self._live, inf
            case ev.Submitted(request=request):
                self._asked_s.setdefault(request.request_id, now)
                self._dirty_s = min(self._dirty_s, now)
            case ev.Forecasted(forecasts=forecasts):
                for request_id, _ in forecasts:
                    if (asked_s := self._asked_s.pop(request_id, None)) is not None:
                        self._forecast_s.append(now - asked_s)
                self._dirty_s = min(self._dirty_s, now)
            case ev.Reported(worker_id=worker_id, report=report):
                sent = self._plans.pop((worker_id, report.applied_plan_seq), None)
                if sent and not report.timings:
                    self._applied.append((now - sent[0], sent[1]))
                self._dirty_s = min(self._dirty_s, now)
            case _:
                pass
        for action in step.actions:
            if isinstance(action, ev.SendPlan):
                self._plans[action.worker_id, action.plan.seq] = (now, self._live)
        self._live += sum((t.after.value > 0) - (t.before.value > 0) for t in step.transitions)

    def timing(self) -> Timing:
        """The measured latencies; where there are too few, the default ones."""
        round_s, round_job_s = self._round_costs()
        return Timing(
            hop_s=self._hop_s(round_s, round_job_s),
            forecast_s=_median(self._forecast_s, DEFAULT.forecast_s),
            round_s=round_s,
            round_job_s=round_job_s,
        )

    def _round_costs(self) -> tuple[float, float]:
        if len(self._rounds) < MIN_SAMPLES:
            return DEFAULT.round_s, DEFAULT.round_job_s
        rows = np.array(self._rounds)
        took_s, jobs = rows[:, 0] * DEFAULT.round_share, rows[:, 1]
        typical = took_s <= 3 * np.median(took_s)  # longer ones waited for the process
        work = np.stack([np.ones(int(typical.sum())), jobs[typical]], axis=1)
        (round_s, round_job_s), _ = nnls(work, took_s[typical])
        return float(round_s), float(round_job_s)

    def _hop_s(self, round_s: float, round_job_s: float) -> float:
        """A plan and the report of it are two hops."""
        hops_s = [(s - round_s - round_job_s * jobs) / 2 for s, jobs in self._applied]
        return max(0.0, _median(hops_s, DEFAULT.hop_s))


def _median(values: list[float], default: float) -> float:
    return float(np.median(values)) if len(values) >= MIN_SAMPLES else default
