"""Capacity plans: how many workers of a hardware keep an SLA under a preset, and what they carry.

Every number is tried by a simulation of the whole workload. One worker more can also hurt: it
changes the placement of all later requests. A plan therefore says what was tried: its number of
workers keeps the SLA, and one worker less does not.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from math import isfinite

import numpy as np

from services.forecast import Ints
from simulator.capacity.search import RateLimit, find_fewest, find_largest_rate
from simulator.parallel import run_parallel
from simulator.report.summary import Summary
from simulator.study import Point, run_points, vary
from simulator.workload.workload import MAX_RATE

ROUNDING = 1e-9  # of a share of requests
ALONE_SAMPLE = 100  # requests that are simulated alone to explain a missed SLA

ReportProgress = Callable[[str, int, int], None]
"""(what is tried or ended, how many so far, of how many: 0 if unknown)"""


@dataclass(frozen=True)
class Candidate:
    """One hardware under one preset: `point` runs the workload on one worker, with the SLA that
    `share` of all requests must meet. At most `most_workers` are tried."""

    point: Point
    share: float
    most_workers: int

    @property
    def name(self) -> str:
        settings = self.point.settings
        return f"{settings.hardware[0].name}, {settings.preset.name}"

    def kept(self, summary: Summary) -> bool:
        """Whether enough of all requests met the SLA. A refused request misses it."""
        return summary.goodput >= self.share - ROUNDING


@dataclass(frozen=True)
class EnoughWorkers:
    """The fewest workers that keep the SLA, with the figures of their run, and the largest rates
    that they and one worker alone carry. Rates are None if all requests arrive at once."""

    workers: int
    summary: Summary
    rate: RateLimit | None
    rate_of_one: RateLimit | None


@dataclass(frozen=True)
class TooFewWorkers:
    """The most workers to be tried do not keep the SLA; more of them may. `share` is that of the
    requests which met it."""

    workers: int
    share: float
    rate_of_one: RateLimit | None


@dataclass(frozen=True)
class MissedAlone:
    """More requests than the SLA leaves miss it even alone on a worker: the `missed` share, as
    estimated from a sample. No number of workers keeps it."""

    missed: float


Verdict = EnoughWorkers | TooFewWorkers | MissedAlone


@dataclass(frozen=True)
class Plan:
    """What was found about a candidate."""

    candidate: Candidate
    verdict: Verdict


def plan(
    candidates: Sequence[Candidate], processes: int, progress: ReportProgress = lambda *_: None
) -> list[Plan]:
    """The plans of all candidates in their order, each in one of `processes`; one candidate alone
    reports every trial. Raises ValueError for a workload that the settings cannot serve.

    A plan takes at most 2 · ⌈log2 most_workers⌉ + 2 · MAX_TRIES + 2 simulations.
    """
    done = count(1)
    if len(candidates) == 1:
        [candidate] = candidates
        verdict = judge(candidate, lambda tried: progress(tried, next(done), 0))
        return [Plan(candidate, verdict)]

    def on_done(place: int) -> None:
        progress(candidates[place].name, next(done), len(candidates))

    verdicts = run_parallel([partial(judge, each) for each in candidates], processes, on_done)
    return [Plan(*found) for found in zip(candidates, verdicts, strict=True)]


def judge(candidate: Candidate, on_trial: Callable[[str], None] = lambda _: None) -> Verdict:
    """The fewest workers that keep the SLA, or why none do. `on_trial` is called before each
    simulation with what it tries.

    No rate is tried at which all requests of the workload arrive within the mean time that one
    takes: there, their number decides rather than the rate.
    """
    trials: dict[int, _Trial] = {}

    def keeps(workers: int) -> bool:
        on_trial(f"{candidate.name}: workers {workers}")
        trials[workers] = _try(candidate.point, workers)
        return candidate.kept(trials[workers].summary)

    def find_rate(workers: int, start: float, served: Summary) -> RateLimit | None:
        def keeps_at(rate: float) -> bool:
            on_trial(f"{candidate.name}: workers {workers}, rate {rate:.3g}")
            return candidate.kept(_try(candidate.point, workers, rate).summary)

        if not isfinite(start):
            return None
        most = min(max(start, served.requests / served.e2e_mean_s), MAX_RATE)
        return find_largest_rate(keeps_at, start, most, workload.least_rate)

    workload = candidate.point.workload
    arrivals = workload.rate
    workers = find_fewest(keeps, candidate.most_workers)
    if workers is None:
        last = trials[candidate.most_workers]
        on_trial(f"{candidate.name}: requests alone")
        missed = _share_missed_alone(candidate.point, last.missed)
        if missed > 1 - candidate.share + ROUNDING:
            return MissedAlone(missed)
        rate_of_one = find_rate(1, arrivals / candidate.most_workers, last.summary)
        return TooFewWorkers(candidate.most_workers, last.summary.goodput, rate_of_one)
    summary = trials[workers].summary
    rate_of_one = find_rate(1, arrivals / workers, summary)
    rate = rate_of_one if workers == 1 else find_rate(workers, arrivals, summary)
    return EnoughWorkers(workers, summary, rate, rate_of_one)


@dataclass(frozen=True)
class _Trial:
    """The figures of a run, and the requests that missed the SLA."""

    summary: Summary
    missed: Ints


def _try(point: Point, workers: int, rate: float = 0.0) -> _Trial:
    """Runs the workload on so many workers, at this rate unless it is 0."""
    points = vary([point], "workers", [workers])
    [found] = run_points(vary(points, "rate", [rate]) if rate else points, 1)
    return _Trial(found.summary, np.flatnonzero(~found.records.meets(point.settings.sla)))


def _share_missed_alone(point: Point, missed: Ints) -> float:
    """The share of all requests that miss the SLA alone on a worker, of those that `missed` it in
    company; estimated from a sample of ALONE_SAMPLE of them."""
    sample = missed[np.linspace(0, len(missed) - 1, min(ALONE_SAMPLE, len(missed))).astype(int)]
    alone = replace(point.workload.take(sample), clients=1)
    trial = _try(replace(point, workload=alone), 1)
    return len(trial.missed) / len(sample) * len(missed) / len(point.workload)
