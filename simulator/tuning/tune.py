"""Tunes the numbers of a preset on simulated traffic.

Each setting of the numbers serves the same scenarios: each traffic at each load with each seed.
Nothing is refused, so that a setting cannot improve latencies by refusals.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from math import expm1, inf, isnan, log
from statistics import fmean

from services.policies.preset import Preset
from simulator.capacity.measured import UNBOUNDED, measure_capacity
from simulator.parallel import run_parallel
from simulator.report.summary import Summary
from simulator.study import Point, read_prompts, run_points, with_numbers
from simulator.tuning.ranges import Range
from simulator.tuning.search import Found, Sensitivity, Setting, Trial, search
from simulator.workload.workload import Workload

ReportProgress = Callable[[str, int, int], None]
"""(what runs, runs so far, of how many: 0 if unknown)"""
LEAST = 1e-9  # seconds or tokens/s; smaller figures have no ratio


@dataclass(frozen=True, slots=True)
class Objective:
    """The figure of a summary to improve, and the one to show beside it. A setting's score is the
    mean over the scenarios; where `relative`, of logarithms, so that each scenario counts by
    ratios."""

    figure: str
    more_is_better: bool
    relative: bool

    def percent(self, change: float) -> float:
        """A difference of two scores: in percent where `relative`, else in points."""
        return 100 * (expm1(change) if self.relative else change)

    def score(self, summaries: Sequence[Summary]) -> float:
        """More is better; -inf if a run has no such figure."""
        values = [float(getattr(summary, self.figure)) for summary in summaries]
        if any(map(isnan, values)):
            return -inf
        if self.relative:
            values = [log(max(value, LEAST)) for value in values]
        mean = fmean(values)
        return mean if self.more_is_better else -mean


OBJECTIVES: Mapping[str, Objective] = {
    "goodput": Objective("goodput", True, False),
    "goodput_tokens": Objective("goodput_tokens_per_s", True, True),
    "throughput": Objective("output_tokens_per_s", True, True),
    "latency": Objective("token_latency_mean_s", False, True),
    "latency_p99": Objective("token_latency_p99_s", False, True),
    "ttft": Objective("ttft_mean_s", False, True),
    "ttft_p99": Objective("ttft_p99_s", False, True),
    "e2e": Objective("e2e_mean_s", False, True),
    "e2e_p99": Objective("e2e_p99_s", False, True),
}
NEEDS_SLA = frozenset({"goodput", "goodput_tokens"})


@dataclass(frozen=True)
class Scenario:
    """One run of each setting; the name has the traffic, its load and the seed."""

    name: str
    point: Point


@dataclass(frozen=True)
class Evaluated:
    """A setting's figures in each scenario, in their order."""

    setting: Setting
    score: float
    summaries: tuple[Summary, ...]


@dataclass(frozen=True)
class Tuned:
    """The start and the best setting on the scenarios of the search, and on those of the test
    traces if there are any."""

    preset: Preset
    objective: Objective
    found: Found
    scenarios: Sequence[str]
    start: Evaluated
    best: Evaluated
    tested: tuple[Sequence[str], Evaluated, Evaluated] | None = None

    @property
    def improved(self) -> bool:
        return self.best.setting != self.start.setting

    @property
    def sensitivities(self) -> tuple[Sensitivity, ...]:
        """The most sensitive number first."""
        return tuple(sorted(self.found.sensitivities, key=lambda each: -each.change))


def make_scenarios(
    points: Sequence[Point], loads: Sequence[float], processes: int
) -> list[Scenario]:
    """The points at each load, a factor of the capacity measured with the first seed of each
    traffic; as they arrive without loads."""
    queued = [replace(p, settings=replace(p.settings, max_queue=UNBOUNDED)) for p in points]
    if not loads:
        return [Scenario(_name(point), point) for point in queued]
    names = dict.fromkeys(point.workload.name for point in queued)
    firsts = [next(p for p in queued if p.workload.name == name) for name in names]
    measured = run_parallel([_Capacity(each) for each in firsts], processes, lambda _: None)
    capacities = dict(zip(names, measured, strict=True))
    return [
        Scenario(f"{_name(point)}, {load:g} ×", _at_load(point, load * capacities[name]))
        for point in queued
        for name in [point.workload.name]
        for load in loads
    ]


@dataclass(frozen=True)
class _Capacity:
    point: Point

    def __call__(self) -> float:
        return measure_capacity(self.point)


def _name(point: Point) -> str:
    return f"{point.workload.name}, seed {point.settings.seed}"


def _at_load(point: Point, rate: float) -> Point:
    return replace(point, workload=point.workload.at_rate(rate))


def same_requests(one: Workload, other: Workload) -> bool:
    """Whether two traces have the same arrivals and lengths."""
    columns = ("arrival_s", "input_tokens", "output_tokens")
    return len(one) == len(other) and all(
        bool((getattr(one, column) == getattr(other, column)).all()) for column in columns
    )


def tune(
    preset: Preset,
    ranges: Mapping[str, Range],
    objective: Objective,
    scenarios: Sequence[Scenario],
    tests: Sequence[Scenario],
    trials: int,
    seed: int,
    processes: int,
    progress: ReportProgress = lambda *_: None,
) -> Tuned:
    """Searches on the scenarios alone; then runs the start and the best setting on the tests, once.
    Equal seeds give equal results on any number of processes."""
    evaluate = _Evaluator(preset, objective, scenarios, processes, progress)
    start = {key: preset.params[key] for key in ranges}
    found = search(start, ranges, evaluate.score, trials, seed)
    tested = None
    if tests:
        on_tests = _Evaluator(preset, objective, tests, processes, progress)
        start_test, best_test = on_tests.evaluate([found.start.setting, found.best.setting])
        tested = ([each.name for each in tests], start_test, best_test)
    return Tuned(
        preset,
        objective,
        found,
        [each.name for each in scenarios],
        evaluate.of(found.start),
        evaluate.of(found.best),
        tested,
    )


class _Evaluator:
    """Runs settings on scenarios; a setting that was tried before is not run again."""

    def __init__(
        self,
        preset: Preset,
        objective: Objective,
        scenarios: Sequence[Scenario],
        processes: int,
        progress: ReportProgress,
    ):
        self._preset, self._objective, self._processes = preset, objective, processes
        self._points = read_prompts([scenario.point for scenario in scenarios])
        self._progress, self._done = progress, count(1)
        self._known: dict[tuple[tuple[str, float], ...], Evaluated] = {}

    def of(self, trial: Trial) -> Evaluated:
        return self._known[_key(trial.setting)]

    def score(self, settings: Sequence[Setting]) -> list[float]:
        return [each.score for each in self.evaluate(settings)]

    def evaluate(self, settings: Sequence[Setting]) -> list[Evaluated]:
        fresh = {_key(s): s for s in settings if _key(s) not in self._known}
        points = [
            replace(point, settings=replace(point.settings, preset=preset))
            for preset in (with_numbers(self._preset, each) for each in fresh.values())
            for point in self._points
        ]
        findings = run_points(
            points, self._processes, lambda _: self._progress("simulating", next(self._done), 0)
        ) if points else []  # fmt: skip
        size = len(self._points)
        for number, (key, setting) in enumerate(fresh.items()):
            summaries = tuple(f.summary for f in findings[number * size : (number + 1) * size])
            self._known[key] = Evaluated(setting, self._objective.score(summaries), summaries)
        return [self._known[_key(setting)] for setting in settings]


def _key(setting: Setting) -> tuple[tuple[str, float], ...]:
    return tuple(sorted(setting.items()))
