"""Normalised latency by rate, as in Figures 6 and 8 of ALISE, with the served scheduler."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import log
from pathlib import Path

import numpy as np

from simulator.hardware.hardware_file import load_hardware
from simulator.papers.datasets import read_datasets
from simulator.papers.document import read_document
from simulator.papers.reproduction import Case, Column, Reproduction, Row, Value, divide
from simulator.papers.schedulers import Conditions, Quality, Scheduler, measure_latency, serve
from simulator.workload.builtin import poisson

REQUESTS = 800
ALISE = "alise"
PAPER = ("alise_rate_ratio", "latency_ratio")
NOTES = (
    "The curves' numbers are not printed; the paper's figures are the largest ratios of its "
    "text. A rate at 0.2 s per token that equals the last rate is a lower bound.",
    "Traces here have 800 requests, the paper's last 30 minutes. Beyond capacity the queue "
    "grows with the length of the trace, and FCFS' latency with it, so that a longer one has "
    "larger ratios.",
    "ALISE's predictor is modelled by its mean error, with independent errors. So it is near "
    "the oracle, as in the paper's Figure 6.",
    "Recompute and Defer are behind ALISE, by less than in the paper, which does not say how "
    "often its scheduler preempts. Here a running request is preempted only for one that needs "
    "less time by a quarter, at most every 32 tokens.",
    "ORCA is left out. The paper does not say how much memory its ORCA reserves. The preset "
    "orca reserves the answer's cap, 2,048 tokens, of which this worker holds four.",
)


@dataclass(frozen=True, slots=True)
class Traffic:
    """A dataset's rates in requests per second, and the quality of its modelled predictors."""

    rates: tuple[float, ...]
    qualities: Mapping[str, Quality]


@dataclass(frozen=True, slots=True)
class Plan:
    """alise.toml. `paper` has figures by dataset and scheduler."""

    hardware: str
    longest_tokens: int
    limit_s: float
    forecast_s: float
    datasets: Mapping[str, Traffic]
    schedulers: tuple[Scheduler, ...]
    paper: Mapping[str, Mapping[str, Row]]


def read_plan() -> Plan:
    """Reads alise.toml."""
    document = read_document(__package__, "alise.toml")
    return Plan(
        document["hardware"],
        document["longest_tokens"],
        document["limit_s"],
        document["forecast_s"],
        {
            name: Traffic(tuple(table.pop("rates")), table)
            for name, table in document["datasets"].items()
        },
        tuple(Scheduler(**scheduler) for scheduler in document["schedulers"]),
        document["paper"],
    )


def compute_row(
    plan: Plan,
    dataset: str,
    rate: float,
    scheduler: Scheduler,
    folder: Path | None,
    count: int,
    seed: int,
) -> Row:
    """Simulates one row. Rows of a dataset have the same requests, with arrivals stretched to the
    rate."""
    rng = np.random.default_rng([seed, 1])
    lengths = read_datasets()[dataset].draw(count, plan.longest_tokens, folder, rng)
    conditions = Conditions(
        load_hardware(plan.hardware),
        plan.longest_tokens,
        plan.forecast_s,
        plan.datasets[dataset].qualities,
        seed,
    )
    result = serve(scheduler, conditions, lengths, poisson(count, rate, rng))
    paper = plan.paper[dataset].get(scheduler.name, {})
    return {
        "dataset": dataset,
        "scheduler": scheduler.name,
        "rate": rate,
        "predictor": scheduler.shown_predictor,
        "lengths": lengths.origin,
        "requests": count,
        **measure_latency(result),
        **{f"paper_{key}": paper.get(key) for key in PAPER},
    }


Curve = list[tuple[float, float]]  # (rate, latency), rates ascending


def sustained_rate(curve: Curve, limit_s: float) -> float | None:
    """Returns the rate at which the latency first reaches the limit, interpolated in its logarithm.
    None if the first rate already exceeds the limit; the last rate, a lower bound, if no rate
    does."""
    if curve[0][1] > limit_s:
        return None
    for (rate, latency_s), (next_rate, next_latency_s) in pairwise(curve):
        if latency_s <= limit_s < next_latency_s:
            share = log(limit_s / latency_s) / log(next_latency_s / latency_s)
            return round(rate + share * (next_rate - rate), 3)
    return curve[-1][0]


def _curves(rows: Sequence[Row]) -> dict[tuple[Value, Value], Curve]:
    curves: dict[tuple[Value, Value], Curve] = {}
    for row in rows:
        rate, latency_s = row["rate"], row["latency_mean_s"]
        assert isinstance(rate, float) and isinstance(latency_s, float)
        curves.setdefault((row["dataset"], row["scheduler"]), []).append((rate, latency_s))
    return curves


def _cases(folder: Path | None, requests: int, seed: int) -> list[Case]:
    plan = read_plan()
    return [
        Case(
            f"{dataset} {scheduler.name} rate={rate:g}",
            partial(compute_row, plan, dataset, rate, scheduler, folder, requests, seed),
        )
        for dataset, traffic in plan.datasets.items()
        for scheduler in plan.schedulers
        for rate in traffic.rates
    ]


def _complete(rows: Sequence[Row]) -> list[Row]:
    """Adds the scheduler's latency over ALISE's at each rate, the rate that the scheduler sustains,
    and ALISE's rate over it."""
    limit_s = read_plan().limit_s
    alise = {(row["dataset"], row["rate"]): row for row in rows if row["scheduler"] == ALISE}
    sustained = {place: sustained_rate(curve, limit_s) for place, curve in _curves(rows).items()}
    return [
        row
        | {
            "latency_ratio": divide(
                row["latency_mean_s"],
                alise.get((row["dataset"], row["rate"]), {}).get("latency_mean_s"),
            ),
            "sustained_rate": sustained[row["dataset"], row["scheduler"]],
            "alise_rate_ratio": divide(
                sustained.get((row["dataset"], ALISE)), sustained[row["dataset"], row["scheduler"]]
            ),
        }
        for row in rows
    ]


TABLES = Reproduction(
    "Latency per token by rate and scheduler, OPT-13B on a V100",
    "ALISE (Zhao and Wang, 2024), Figures 6 and 8, shape",
    REQUESTS,
    partial(_cases, None),
    (
        Column("dataset", "Data"),
        Column("scheduler", "Scheduler"),
        Column("rate", "Rate", ".1f"),
        Column("latency_mean_s", "s/token", ".3f"),
        Column("latency_p99_s", "p99", ".2f"),
        Column("latency_ratio", "÷ ALISE", ".2f", beside=True),
        Column("sustained_rate", "At 0.2 s", ".2f"),
        Column("alise_rate_ratio", "ALISE ×", ".2f", beside=True),
        Column("waiting_p99_s", "Waiting p99", ".1f"),
        Column("preemptions", "Preempted", ",d"),
        Column("evictions", "Evicted", ",d"),
    ),
    _complete,
    NOTES,
    cases_from=_cases,
)
