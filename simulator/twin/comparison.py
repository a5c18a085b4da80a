"""Compares a measured run with its twin.

The error of a figure is (simulated - measured) / measured. Per request, the error of a latency is
its absolute relative error; a measured latency of 0 has none.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import nan

import numpy as np

from services.core import Sla
from services.forecast import Floats
from services.policies.snapshot import Bools
from simulator.engine.records import Records
from simulator.twin.recorded_run import RecordedRun

P99 = 0.99
LATENCIES: Mapping[str, Callable[[Records], Floats]] = {
    "ttft_s": lambda records: records.ttft_s,
    "tpot_s": lambda records: records.tpot_s,
    "e2e_s": lambda records: records.e2e_s,
}


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of both runs."""

    measured: float
    simulated: float

    @property
    def error(self) -> float:
        """Relative to the measured figure; NaN if that is 0 and the other is not."""
        if self.measured == self.simulated:
            return 0.0
        return self.simulated / self.measured - 1 if self.measured else nan


@dataclass(frozen=True, slots=True)
class LatencyComparison:
    """One latency: figures of its distribution, and the errors of single requests."""

    mean: Figure
    median: Figure
    p99: Figure
    request_error_p50: float
    request_error_p99: float


@dataclass(frozen=True)
class Comparison:
    """A measured run and its twin. `goodput` is the share of requests within their SLA, so its
    error is better read as a difference; `makespan_s` is from the first arrival to the last
    token. `left_out` counts requests of the log that did not finish."""

    requests: int
    left_out: int
    latencies: Mapping[str, LatencyComparison]
    makespan_s: Figure
    tokens_per_s: Figure
    goodput: Figure
    step_s: Figure

    @property
    def worst_median(self) -> float:
        """The largest absolute error of a latency's median."""
        return max(abs(c.median.error) for c in self.latencies.values())

    @property
    def worst_p99(self) -> float:
        """The largest absolute error of a latency's p99."""
        return max(abs(c.p99.error) for c in self.latencies.values())


def compare(
    measured: RecordedRun,
    simulated: RecordedRun,
    sla: Sla | None = None,
    among: range | None = None,
) -> Comparison:
    """Compares the requests that finished in both runs; the ids of `simulated`, a twin, are places
    in `measured`. `sla` replaces the requests' own. Only requests with a place in `among` count, if
    it is given. Raises ValueError if none of them finished in both runs."""
    among = range(len(measured.ids)) if among is None else among
    rows = np.array([row for row, place in enumerate(simulated.places) if place in among])
    if not len(rows):
        raise ValueError(f"{measured.workload.name}: no request finished in both runs")
    places = simulated.places[rows]
    ours, theirs = measured.records.select(places), simulated.records.select(rows)
    requests = [measured.workload.requests[place] for place in places]
    met = [
        _meets(records, [sla or request.sla for request in requests]) for records in (ours, theirs)
    ]
    goodput = Figure(*(float(each.mean()) for each in met))
    makespan_s = Figure(*(_makespan_s(records) for records in (ours, theirs)))
    tokens = float(ours.tokens.sum())
    return Comparison(
        len(places),
        measured.left_out + len(among) - len(places),
        {name: _compare(of(ours), of(theirs)) for name, of in LATENCIES.items()},
        makespan_s,
        Figure(*(tokens / span_s for span_s in (makespan_s.measured, makespan_s.simulated))),
        goodput,
        Figure(_step_s(measured), _step_s(simulated)),
    )


def _compare(measured: Floats, simulated: Floats) -> LatencyComparison:
    positive = measured > 0
    relative = np.abs(simulated[positive] / measured[positive] - 1)
    errors = [float(q) for q in np.quantile(relative, [0.5, P99])] if len(relative) else [nan, nan]
    mean, median, p99 = (
        Figure(float(figure(measured)), float(figure(simulated)))
        for figure in (np.mean, np.median, lambda values: np.quantile(values, P99))
    )
    return LatencyComparison(mean, median, p99, *errors)


def _makespan_s(records: Records) -> float:
    return float(records.last_s.max() - records.arrival_s.min())


def _meets(records: Records, slas: list[Sla]) -> Bools:
    """Which requests met their own SLA."""
    met: Bools = np.zeros(len(slas), bool)
    for sla in set(slas):
        mine = np.array([each == sla for each in slas])
        met |= mine & records.meets(sla)
    return met


def _step_s(run: RecordedRun) -> float:
    """Mean time of a step with the host time after it, over all workers."""
    steps = sum(len(worker.timings) for worker in run.steps)
    device_s = sum(t.elapsed_s for worker in run.steps for t in worker.timings)
    host_s = sum(len(worker.timings) * worker.host_s for worker in run.steps)
    return (device_s + host_s) / max(1, steps)
