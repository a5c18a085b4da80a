"""Goodput by number of clients, as in Figure 7 of the Past-Future paper."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from services.core import Sla
from services.policies.preset import choose
from simulator.engine.settings import RunSettings
from simulator.engine.simulation import RunResult, simulate
from simulator.hardware.hardware_file import load_hardware
from simulator.papers.document import read_document
from simulator.papers.past_future.table1 import draw_burst
from simulator.papers.reproduction import Case, Column, Reproduction, Row, divide
from simulator.papers.schedulers import Scheduler
from simulator.workload.workload import Workload

REQUESTS = 200
PAST_FUTURE = "past-future"
P99 = 0.99
WARM_UP = 2  # requests of each client that are not counted
NOTES = (
    "The paper's Figure 7 has curves without numbers. Its claim is 2 to 3 times the goodput of "
    "other schedulers under heavy load. PF × is Past-Future's figure over that of the row.",
    "Past-Future over conservative holds from the load on at which conservative admission queues.",
    "Past-Future over aggressive holds for stall-free tokens, those of requests that keep MTPOT, "
    "above all at watermark 99 %, and grows with the load; not by a factor of 2. Evictions agree "
    "with Table 1 (24 % of requests at watermark 95 % and 94 % at 99 % on D1), and evictions alone "
    "break MTPOT. Some requests are evicted several times, so fewer break it.",
    "It does not hold for goodput, which includes TTFT. In a closed loop of more clients than "
    "memory holds, the mean time in the queue is (clients - running) / throughput for any "
    "scheduler (Little's law). A 7B worker ends one D1 request in 4.6 s here, so that three "
    "clients too many exceed a TTFT of 10 s, and all goodputs fall together. A plateau under "
    "overload, as in the paper, needs clients that give up or a bounded queue; its text describes "
    "neither.",
)


@dataclass(frozen=True, slots=True)
class Model:
    """A model's hardware profile, loads and SLA."""

    name: str
    hardware: str
    loads: Sequence[float]
    ttft_s: float
    mtpot_s: float

    @property
    def sla(self) -> Sla:
        return Sla("paper", ttft_s=self.ttft_s, mtpot_s=self.mtpot_s)


@dataclass(frozen=True, slots=True)
class Plan:
    """goodput.toml."""

    requests_per_client: int
    models: tuple[Model, ...]
    max_tokens: Mapping[str, int]
    schedulers: tuple[Scheduler, ...]


def read_plan() -> Plan:
    """Reads goodput.toml."""
    document = read_document(__package__, "goodput.toml")
    return Plan(
        document["requests_per_client"],
        tuple(Model(**model) for model in document["models"]),
        document["max_tokens"],
        tuple(Scheduler(**scheduler) for scheduler in document["schedulers"]),
    )


def held_requests(workload: Workload, kv_tokens: int) -> float:
    """Requests that fill the memory on average: each holds its prompt and half its answer, weighted
    by the time that it runs, which is its answer's length."""
    inputs, outputs = workload.input_tokens, workload.output_tokens
    held_tokens = np.average(inputs + outputs / 2, weights=outputs)
    return float(kv_tokens / held_tokens)


def compute_row(
    plan: Plan, model: Model, dataset: str, scheduler: Scheduler, load: float, count: int, seed: int
) -> Row:
    """Simulates a closed loop of clients; rows of a dataset have the same requests."""
    hardware = load_hardware(model.hardware)
    capacity = held_requests(draw_burst(dataset, 1_000, seed), hardware.kv_tokens)
    clients = max(1, round(load * capacity))
    burst = draw_burst(dataset, max(count, plan.requests_per_client * clients), seed)
    workload = Workload(
        dataset, burst.arrival_s, burst.input_tokens, burst.output_tokens, clients=clients
    )
    settings = RunSettings(
        choose(scheduler.preset, scheduler.numbers),
        (hardware,),
        model.sla,
        max_tokens=plan.max_tokens[dataset],
        predictor=scheduler.predictor,
        seed=seed,
    )
    return {
        "model": model.name,
        "dataset": dataset,
        "load": load,
        "clients": clients,
        "scheduler": scheduler.name,
        "parameter": scheduler.parameter,
        "requests": len(workload),
        **measure(simulate(settings, workload)),
    }


def measure(result: RunResult) -> Row:
    """Goodput counts tokens of requests that keep TTFT and MTPOT, stall-free tokens those of
    requests that keep MTPOT. `p99_kept`: 99 % of requests keep TTFT, and 99 % MTPOT. The first two
    requests of each client are left out: all clients start at once, and without history."""
    records, sla = result.records, result.settings.sla
    counted = np.arange(len(result.workload)) >= WARM_UP * result.workload.clients
    ttft_s, gap_s = records.ttft_s[counted], records.longest_gap_s[counted]
    tokens = records.tokens[counted]
    span_s = float(records.last_s[counted].max() - records.arrival_s[counted].min())
    in_time, smooth = ttft_s <= sla.ttft_s, gap_s <= sla.mtpot_s
    return {
        "goodput_tokens_per_s": round(float(tokens[in_time & smooth].sum()) / span_s, 1),
        "stall_free_tokens_per_s": round(float(tokens[smooth].sum()) / span_s, 1),
        "output_tokens_per_s": round(float(tokens.sum()) / span_s, 1),
        "met_pct": round(100 * float((in_time & smooth).mean()), 1),
        "p99_kept": "yes" if min(in_time.mean(), smooth.mean()) >= P99 else "no",
        "ttft_mean_s": round(float(ttft_s.mean()), 2),
        "ttft_p99_s": round(float(np.quantile(ttft_s, P99)), 2),
        "gap_p99_s": round(float(np.quantile(gap_s, P99)), 2),
        "evicted_pct": round(100 * float(records.evictions[counted].mean()), 1),
    }


def _cases(requests: int, seed: int) -> list[Case]:
    plan = read_plan()
    return [
        Case(
            f"{model.name} {dataset} load={load:g} {scheduler.label}",
            partial(compute_row, plan, model, dataset, scheduler, load, requests, seed),
        )
        for model in plan.models
        for dataset in plan.max_tokens
        for load in model.loads
        for scheduler in plan.schedulers
    ]


def _complete(rows: Sequence[Row]) -> list[Row]:
    """Adds Past-Future's goodput and stall-free tokens over those of the row."""
    best = {_place(row): row for row in rows if row["scheduler"] == PAST_FUTURE}
    return [row | _compare(best.get(_place(row)), row) for row in rows]


def _place(row: Row) -> tuple[object, ...]:
    return row["model"], row["dataset"], row["load"]


def _compare(best: Row | None, row: Row) -> Row:
    compared: Row = {}
    for key in ("goodput", "stall_free"):
        ours = best[f"{key}_tokens_per_s"] if best else None
        compared[f"past_future_{key}_ratio"] = divide(ours, row[f"{key}_tokens_per_s"])
    return compared


GOODPUT = Reproduction(
    "Goodput of schedulers by number of clients on three length distributions and three models",
    "Past-Future Scheduler (Gong et al., ASPLOS 2025), Figure 7, shape",
    REQUESTS,
    _cases,
    (
        Column("model", "Model"),
        Column("dataset", "Data"),
        Column("load", "Load", ".2f"),
        Column("clients", "Clients", "d"),
        Column("scheduler", "Scheduler"),
        Column("parameter", "Parameter"),
        Column("goodput_tokens_per_s", "Goodput", ",.0f"),
        Column("past_future_goodput_ratio", "PF ×", ".2f"),
        Column("stall_free_tokens_per_s", "Stall-free", ",.0f"),
        Column("past_future_stall_free_ratio", "PF ×", ".2f"),
        Column("output_tokens_per_s", "Tokens/s", ",.0f"),
        Column("p99_kept", "P99"),
        Column("ttft_mean_s", "TTFT s", ".1f"),
        Column("ttft_p99_s", "p99", ".1f"),
        Column("gap_p99_s", "Gap p99", ".1f"),
        Column("evicted_pct", "Evicted %", ".1f"),
    ),
    _complete,
    NOTES,
)
