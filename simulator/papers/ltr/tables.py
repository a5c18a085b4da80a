"""Tables 1 and 2 and Figures 3 to 5 of Learning to Rank, with the served scheduler."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from services.forecast import Floats
from simulator.hardware.hardware_file import load_hardware
from simulator.papers.datasets import Lengths, read_datasets
from simulator.papers.document import read_document
from simulator.papers.modelled import kendall_tau
from simulator.papers.reproduction import Case, Column, Reproduction, Row, divide
from simulator.papers.schedulers import Conditions, Quality, Scheduler, measure_latency, serve
from simulator.workload.builtin import burst, poisson

REQUESTS = 2_000
BURST, RATE, SAMPLES = "burst", "rate", "samples"
FCFS = "fcfs"
PAPER = ("latency_mean_s", "latency_p90_s", "samples_s")
NOTES = (
    "This worker is about twice as fast as the paper's or more: its step times follow from the "
    "data sheet, while vLLM 0.4.1 adds the host's time to each step. Compare ratios: FCFS × is "
    "FCFS' latency, or time to the samples, over that of the row. For the same reason a rate is "
    "a lighter load here.",
    "The preset ltr prevents starvation (threshold 200 iterations, quantum 10), as in the "
    "authors' fairness runs. It costs latency, since promoted requests of any length take "
    "turns. `may starve` is without. The paper does not say which its Tables 1 and 2 are; both "
    "rows have its figure beside.",
    "Classification hardly ranks (tau), and without starvation prevention it is near FCFS, as "
    "in the paper. With it, taking turns lets short requests end early.",
    "The predictor's time for a burst passes before the first forecast; requests run meanwhile "
    "in order of arrival. The paper's engine waits for it.",
    "Perception is Perception Only: the served model generates a guess of 15 tokens, first come, "
    "first served; then its request is ranked by a modelled length. Guess and answer are one "
    "sequence here and in the authors' public code, so that no prompt is computed twice. The "
    "latency is per token of the answer alone; that code also counts the guess.",
    "Waiting is the paper's max_waiting, of Figure 4. Perception's counts from the guess on.",
)


@dataclass(frozen=True, slots=True)
class Trial:
    """An experiment on a dataset: a burst, arrivals at a rate, or the time to a number of
    samples."""

    experiment: str
    dataset: str
    rate: float | None = None

    @property
    def name(self) -> str:
        rate = "" if self.rate is None else f"={self.rate:g}"
        return f"{self.dataset} {self.experiment}{rate}"


@dataclass(frozen=True, slots=True)
class Quantities:
    """The time of one forecast of a dataset, and the quality of each modelled predictor."""

    forecast_s: float
    qualities: Mapping[str, Quality]


@dataclass(frozen=True, slots=True)
class Plan:
    """ltr.toml. `paper` has figures by experiment, dataset and scheduler."""

    hardware: str
    longest_tokens: int
    rates: tuple[float, ...]
    samples_of: int
    datasets: Mapping[str, Quantities]
    schedulers: tuple[Scheduler, ...]
    paper: Mapping[str, Mapping[str, Mapping[str, Row]]]

    def trials(self) -> list[Trial]:
        """The experiments of each dataset."""
        return [
            trial
            for name in self.datasets
            for trial in (
                Trial(BURST, name),
                *(Trial(RATE, name, rate) for rate in self.rates),
                Trial(SAMPLES, name),
            )
        ]


def read_plan() -> Plan:
    """Reads ltr.toml."""
    document = read_document(__package__, "ltr.toml")
    return Plan(
        document["hardware"],
        document["longest_tokens"],
        tuple(document["rates"]),
        document["samples_of"],
        {
            name: Quantities(table.pop("forecast_s"), table)
            for name, table in document["datasets"].items()
        },
        tuple(Scheduler(**scheduler) for scheduler in document["schedulers"]),
        document["paper"],
    )


def compute_row(
    plan: Plan, trial: Trial, scheduler: Scheduler, folder: Path | None, count: int, seed: int
) -> Row:
    """Simulates one row. Rows of a dataset and experiment have the same requests."""
    sampled = trial.experiment == SAMPLES
    prompts = plan.samples_of * count if sampled else count
    samples = max(1, count // 2) if sampled else 0
    rng = np.random.default_rng([seed, 1])
    lengths = read_datasets()[trial.dataset].draw(prompts, plan.longest_tokens, folder, rng)
    arrival_s, at_once = _arrive(trial, prompts, rng)
    quantities = plan.datasets[trial.dataset]
    conditions = Conditions(
        load_hardware(plan.hardware),
        plan.longest_tokens,
        quantities.forecast_s * at_once,
        quantities.qualities,
        seed,
        samples,
    )
    result = serve(scheduler, conditions, lengths, arrival_s)
    row: Row = {
        "dataset": trial.dataset,
        "experiment": trial.experiment,
        "rate": trial.rate,
        "scheduler": scheduler.name,
        "parameter": scheduler.parameter,
        "predictor": scheduler.shown_predictor,
        "tau": _tau(result.workload.forecast_tokens, lengths),
        "lengths": lengths.origin,
        "requests": prompts,
        "samples_s": round(result.end_s, 2) if sampled else None,
        **measure_latency(result),
    }
    paper = plan.paper.get(trial.experiment, {}).get(trial.dataset, {}).get(scheduler.name, {})
    return row | {f"paper_{key}": paper.get(key) for key in PAPER}


def _arrive(trial: Trial, count: int, rng: np.random.Generator) -> tuple[Floats, int]:
    """Arrival times, and how many prompts the predictor scores before its first answer."""
    if trial.rate is None:
        return burst(count, 0.0, rng), count
    return poisson(count, trial.rate, rng), 1


def _tau(forecast_tokens: Sequence[int], lengths: Lengths) -> float | None:
    if not forecast_tokens:
        return None
    return round(kendall_tau(forecast_tokens, lengths.output_tokens), 3)


def _cases(folder: Path | None, requests: int, seed: int) -> list[Case]:
    plan = read_plan()
    return [
        Case(
            f"{trial.name} {scheduler.label}",
            partial(compute_row, plan, trial, scheduler, folder, requests, seed),
        )
        for trial in plan.trials()
        for scheduler in plan.schedulers
    ]


def _complete(rows: Sequence[Row]) -> list[Row]:
    """Adds FCFS' latency and time to the samples over those of the row, and the paper's."""
    fcfs = {_place(row): row for row in rows if row["scheduler"] == FCFS}
    return [row | _compare(fcfs.get(_place(row), {}), row) for row in rows]


def _place(row: Row) -> tuple[object, ...]:
    return row["dataset"], row["experiment"], row["rate"]


def _compare(fcfs: Row, row: Row) -> Row:
    key = "samples_s" if row["experiment"] == SAMPLES else "latency_mean_s"
    return {
        "fcfs_ratio": divide(fcfs.get(key), row[key]),
        "paper_fcfs_ratio": divide(fcfs.get(f"paper_{key}"), row[f"paper_{key}"]),
    }


LTR = Reproduction(
    "Latency per token of a burst and at rates, time to samples, and waiting, by scheduler",
    "Learning to Rank (Fu et al., NeurIPS 2024), Tables 1 and 2, Figures 3 to 5",
    REQUESTS,
    partial(_cases, None),
    (
        Column("dataset", "Data"),
        Column("experiment", "Experiment"),
        Column("rate", "Rate", ".0f"),
        Column("scheduler", "Scheduler"),
        Column("parameter", ""),
        Column("tau", "tau", ".2f"),
        Column("latency_mean_s", "s/token", ".3f", beside=True),
        Column("latency_p90_s", "p90", ".2f", beside=True),
        Column("latency_p99_s", "p99", ".2f"),
        Column("samples_s", "Samples s", ".1f", beside=True),
        Column("fcfs_ratio", "FCFS ×", ".2f", beside=True),
        Column("waiting_mean_s", "Waiting s", ".1f"),
        Column("waiting_p99_s", "p99", ".1f"),
    ),
    _complete,
    NOTES,
    cases_from=_cases,
)
