"""Contests: on each paper's workload, its preset, the baselines, the oracle, a tail-aware preset
and foretoken.

All schedulers of a paper serve the same requests on the same hardware. foretoken has the forecasts
of the paper's preset, or those of `history` where the preset has none. The oracle knows the true
lengths.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from simulator.engine.given import GIVEN
from simulator.papers.alise import tables as alise
from simulator.papers.ltr import tables as ltr
from simulator.papers.magnus import tables as magnus
from simulator.papers.past_future import goodput
from simulator.papers.reproduction import Case, Column, Reproduction, Row, divide
from simulator.papers.schedulers import Scheduler
from simulator.papers.scls import tables as scls
from simulator.papers.served import ServedRun

REQUESTS = 600
PAPER, BASELINE, BEST, ORACLE, TAIL_AWARE, FORETOKEN = (
    "paper", "baseline", "best baseline", "oracle", "tail-aware", "foretoken"
)  # fmt: skip
UNIBOOST = "uniboost"
PAST_FUTURE_LOAD = 1.0  # clients, as a share of the requests that memory holds
ALISE_RATE, MAGNUS_RATE = 2.4, 16.0  # per second
NOTES = (
    "× paper's: how many times better the figure is than that of the paper's preset. Mean and p99 "
    "are of TTFT where the figure is goodput, of seconds per output token where it is that, and of "
    "response times where it is requests/s.",
    "The static batches of SCLS and Magnus run beside continuous ones (ils, ccb, uniboost, "
    "foretoken) with steps that cost as much. The papers' continuous engines were slower; see the "
    "notes of their tables.",
)
ORACLE_FORECASTS = f"{FORETOKEN} with true lengths"
LEFT_OUT = ("magnus-words",)  # variants of a paper's preset
# The roles of schedulers by name; every other one is a baseline.
ROLES = {
    "past-future reserved=5%": PAPER,
    "alise": PAPER,
    "ranking": PAPER,
    "scls": PAPER,
    "magnus": PAPER,
    "optimum": ORACLE,
    "oracle": ORACLE,
    ORACLE_FORECASTS: ORACLE,
    "magnus-oracle": ORACLE,
    UNIBOOST: TAIL_AWARE,
    FORETOKEN: FORETOKEN,
}
WITHOUT_FORECAST = Scheduler(UNIBOOST, UNIBOOST)
T = TypeVar("T")
Run = Callable[[T, Path | None, int, int], Row]
"""Simulates a scheduler: (scheduler, folder of lengths, requests, seed). Only ALISE and LTR
read files of lengths."""


@dataclass(frozen=True, slots=True)
class Contestant:
    """A scheduler of a contest. `run` is a `Run` without its first argument."""

    name: str
    role: str
    run: Callable[[Path | None, int, int], Row]


@dataclass(frozen=True, slots=True)
class Measure:
    """The compared figure: its title, whether more is better, and the keys of rows of its value, a
    mean latency and its p99."""

    title: str
    more_is_better: bool
    value: str
    mean_s: str
    p99_s: str


GOODPUT = Measure("goodput tok/s", True, "goodput_tokens_per_s", "ttft_mean_s", "ttft_p99_s")
PER_TOKEN = Measure("s/token", False, "latency_mean_s", "latency_mean_s", "latency_p99_s")
THROUGHPUT = Measure("requests/s", True, "requests_per_s", "response_mean_s", "response_p99_s")


@dataclass(frozen=True, slots=True)
class Contest:
    """A paper's workload and measure, and the schedulers on it."""

    paper: str
    workload: str
    measure: Measure
    contestants: Sequence[Contestant]


def read_contests() -> list[Contest]:
    """Returns all contests, with the settings of the papers' own tables."""
    return [_past_future(), _alise(), _ltr(), _scls(), _magnus()]


def _contest(
    paper: str, workload: str, measure: Measure, run: Run[T], schedulers: Mapping[str, T]
) -> Contest:
    contestants = [
        Contestant(name, ROLES.get(name, BASELINE), partial(run, each))
        for name, each in schedulers.items()
    ]
    return Contest(paper, workload, measure, contestants)


def _by_label(schedulers: Iterable[Scheduler]) -> dict[str, Scheduler]:
    return {each.label: each for each in schedulers}


def _past_future() -> Contest:
    plan = goodput.read_plan()
    ours = Scheduler(FORETOKEN, FORETOKEN, predictor="history")
    schedulers = _by_label((*plan.schedulers, WITHOUT_FORECAST, ours))
    workload = f"D1, {plan.models[0].name}"
    return _contest("Past-Future", workload, GOODPUT, _run_past_future, schedulers)


def _run_past_future(scheduler: Scheduler, _: Path | None, requests: int, seed: int) -> Row:
    plan = goodput.read_plan()
    load = PAST_FUTURE_LOAD
    return goodput.compute_row(plan, plan.models[0], "D1", scheduler, load, requests, seed)


def _alise() -> Contest:
    ours = Scheduler(FORETOKEN, FORETOKEN, modelled="retrieval")
    schedulers = _by_label((*alise.read_plan().schedulers, WITHOUT_FORECAST, ours))
    return _contest("ALISE", f"ShareGPT, {ALISE_RATE:g}/s", PER_TOKEN, _run_alise, schedulers)


def _run_alise(scheduler: Scheduler, folder: Path | None, requests: int, seed: int) -> Row:
    plan = alise.read_plan()
    return alise.compute_row(plan, "sharegpt", ALISE_RATE, scheduler, folder, requests, seed)


def _ltr() -> Contest:
    """Leaves out the rows that may starve: one of them is the paper's preset again."""
    theirs = [each for each in ltr.read_plan().schedulers if not each.parameter]
    ours = Scheduler(FORETOKEN, FORETOKEN, modelled="ranker")
    schedulers = _by_label((*theirs, WITHOUT_FORECAST, ours))
    return _contest("LTR", "LMSYS, burst", PER_TOKEN, _run_ltr, schedulers)


def _run_ltr(scheduler: Scheduler, folder: Path | None, requests: int, seed: int) -> Row:
    trial = ltr.Trial(ltr.BURST, "lmsys")
    return ltr.compute_row(ltr.read_plan(), trial, scheduler, folder, requests, seed)


def _scls() -> Contest:
    engine = scls.ENGINES[-1]
    ours = ServedRun(FORETOKEN, engine.hardware, scls.WORKERS, predictor="history")
    runs = {
        **{name: scls.TableRow(engine, scls.SCHEDULERS, name).run for name in engine.schedulers},
        UNIBOOST: ServedRun(UNIBOOST, engine.hardware, scls.WORKERS),
        FORETOKEN: ours,
        ORACLE_FORECASTS: replace(ours, predictor="oracle"),
    }
    workload = f"CodeFuse, {scls.RATE:g}/s, {engine.name}"
    return _contest("SCLS", workload, THROUGHPUT, _run_scls, runs)


def _run_scls(run: ServedRun, _: Path | None, requests: int, seed: int) -> Row:
    return run.measure(scls.draw_requests(requests, seed), scls.MAX_TOKENS, seed)


def _magnus() -> Contest:
    runs = {
        **{name: run for name, run in magnus.SCHEDULERS.items() if name not in LEFT_OUT},
        UNIBOOST: magnus.served(UNIBOOST),
        FORETOKEN: magnus.served(FORETOKEN, predictor=GIVEN),
    }
    return _contest("Magnus", f"{MAGNUS_RATE:g}/s", THROUGHPUT, _run_magnus, runs)


def _run_magnus(run: ServedRun, _: Path | None, requests: int, seed: int) -> Row:
    return magnus.measure(run, MAGNUS_RATE, requests, seed)


def compute_row(
    contest: Contest, contestant: Contestant, folder: Path | None, requests: int, seed: int
) -> Row:
    """Simulates one contestant."""
    found = contestant.run(folder, requests, seed)
    return {
        "paper": contest.paper,
        "workload": contest.workload,
        "scheduler": contestant.name,
        "role": contestant.role,
        "measure": contest.measure.title,
        "value": found[contest.measure.value],
        "mean_s": found[contest.measure.mean_s],
        "p99_s": found[contest.measure.p99_s],
    }


def _cases(folder: Path | None, requests: int, seed: int) -> list[Case]:
    return [
        Case(
            f"{contest.paper} {contestant.name}",
            partial(compute_row, contest, contestant, folder, requests, seed),
        )
        for contest in read_contests()
        for contestant in contest.contestants
    ]


def _complete(rows: Sequence[Row]) -> list[Row]:
    """Marks the best baseline of each contest, and adds how many times better the value of the row
    is than that of the paper's preset. O(rows²)."""
    more_is_better = {each.title: each.more_is_better for each in (GOODPUT, PER_TOKEN, THROUGHPUT)}
    completed = []
    for row in rows:
        more = more_is_better[str(row["measure"])]
        contest = [each for each in rows if each["paper"] == row["paper"]]
        baselines = [each for each in contest if each["role"] == BASELINE]
        is_best = bool(baselines) and row is (max if more else min)(baselines, key=_value)
        papers = next((each["value"] for each in contest if each["role"] == PAPER), None)
        ratio = divide(row["value"], papers) if more else divide(papers, row["value"])
        completed.append(row | {"role": BEST if is_best else row["role"], "paper_ratio": ratio})
    return completed


def _value(row: Row) -> float:
    value = row["value"]
    assert isinstance(value, float)
    return value


ALL = Reproduction(
    "Every paper's preset, its baselines, the oracle, uniboost and foretoken on its workload",
    "the tables past-future-goodput, alise, ltr, scls and magnus",
    REQUESTS,
    partial(_cases, None),
    (
        Column("paper", "Paper"),
        Column("workload", "Workload"),
        Column("scheduler", "Scheduler"),
        Column("role", "Role"),
        Column("measure", "Measure"),
        Column("value", "Value", ".3g"),
        Column("paper_ratio", "× paper's", ".2f"),
        Column("mean_s", "Mean s", ".3g"),
        Column("p99_s", "p99", ".3g"),
    ),
    _complete,
    NOTES,
    cases_from=_cases,
)
