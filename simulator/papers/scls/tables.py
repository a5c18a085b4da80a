"""SCLS' evaluation: seven schedulers, slice lengths, and numbers of workers on two engines."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from simulator.papers.gains import compare_gains, read_gains
from simulator.papers.reproduction import Case, Column, Reproduction, Row
from simulator.papers.served import ServedRun
from simulator.workload.builtin import build_workload
from simulator.workload.workload import Workload

REQUESTS = 3_000
RATE = 20.0  # per second
MAX_TOKENS = 1_024
WORKERS, SLICE_TOKENS = 8, 128
SLICES = (32, 64, 256, 512, 1_024)
FEWER_WORKERS = (1, 2, 4)
SCHEDULERS, SLICING, SCALING = "schedulers", "slices", "workers"


@dataclass(frozen=True, slots=True)
class Engine:
    """An inference engine: its hardware profile, and the paper's numbers for it (§5.1). Only
    transformers has a ζ below 1: the memory of the other profile is what its rules allow (Algorithm
    2)."""

    name: str
    hardware: str
    schedulers: tuple[str, ...]
    numbers: Mapping[str, float]


ABLATION = ("so", "pm", "ab", "lb", "scls")
ENGINES = (
    Engine(
        "hf",
        "a100-80g-llama2-13b-hf",
        ("sls", *ABLATION),
        {"batch_size": 16, "interval_s": 6.0, "zeta": 0.9},
    ),
    Engine(
        "ds",
        "a100-80g-llama2-13b-ds",
        ("sls", "ils", *ABLATION),
        {"batch_size": 12, "interval_s": 3.0, "zeta": 1.0},
    ),
)
# The engine's numbers that a scheduler takes. From ab on, memory alone limits the batch size.
TAKEN: dict[str, tuple[str, ...]] = {
    "sls": ("batch_size",),
    "ils": (),
    "so": ("batch_size", "slice_tokens"),
    "pm": ("batch_size", "slice_tokens", "interval_s", "zeta"),
    **dict.fromkeys(("ab", "lb", "scls"), ("slice_tokens", "interval_s", "zeta")),
}
NOTES = (
    "Lengths: the CodeFuse trace is private. The workload codefuse has log-normal lengths with the "
    "shares that the paper's text gives. The longest answer of a batch decides the time of sls, so "
    "that the gains over it follow the assumed tail of the answers.",
    "Requests: the paper sends for 10 minutes, which is --requests 12000. Rates count until the "
    "last request has ended.",
    "DeepSpeed: Algorithm 2 allows 28, 22 or 12 requests up to 512, 1,024 or 2,048 tokens. Here "
    "tokens limit a batch, and at most 28 requests, so that its size falls gradually. The paper "
    "prints no step time of this engine; the profile is derived from data sheets.",
    "ils: the paper gives neither the number of requests that FastGen runs at once nor its step "
    "times. Here it has the kernels and the memory of the other DeepSpeed schedulers, reserves "
    "prompt + max_tokens, and computes neither padding nor invalid tokens nor a second prefill. "
    "So it nearly keeps up with the 20 requests per second, hence its response times and its small "
    "deviation of completion; the paper's gains over it are not reproduced.",
    "Completion: the standard deviation over the workers of the time at which each ends its last "
    "step. As in the paper, that of scls is far below that of sls. From ab on, it is mostly the "
    "end of the run: the last unfinished requests share one batch on one worker.",
)


@dataclass(frozen=True, slots=True)
class TableRow:
    """One run of a `study`: SCHEDULERS, SLICING or SCALING."""

    engine: Engine
    study: str
    scheduler: str
    slice_tokens: int = SLICE_TOKENS
    workers: int = WORKERS

    @property
    def label(self) -> str:
        parts = [self.scheduler]
        if self.study == SLICING:
            parts.append(f"slice={self.slice_tokens}")
        if self.study == SCALING:
            parts.append(f"workers={self.workers}")
        return " ".join(parts)

    @property
    def run(self) -> ServedRun:
        known = {**self.engine.numbers, "slice_tokens": self.slice_tokens}
        numbers = {name: known[name] for name in TAKEN[self.scheduler]}
        return ServedRun(self.scheduler, self.engine.hardware, self.workers, numbers)


def list_rows(engine: Engine) -> list[TableRow]:
    """Returns the schedulers, then scls by slice length and by number of workers."""
    return [
        *(TableRow(engine, SCHEDULERS, name) for name in engine.schedulers),
        *(TableRow(engine, SLICING, "scls", slice_tokens=tokens) for tokens in SLICES),
        *(TableRow(engine, SCALING, "scls", workers=count) for count in FEWER_WORKERS),
    ]


def compute_row(row: TableRow, requests: int, seed: int) -> Row:
    """Simulates one row; all rows have the same requests."""
    return {
        "engine": row.engine.name,
        "study": row.study,
        "scheduler": row.scheduler,
        "label": row.label,
        "slice_tokens": row.slice_tokens,
        "workers": row.workers,
        "rate": RATE,
        **row.run.measure(draw_requests(requests, seed), MAX_TOKENS, seed),
    }


def draw_requests(count: int, seed: int) -> Workload:
    """Draws the requests of all rows."""
    return build_workload("codefuse", count, "poisson", RATE, 0, seed)


def _cases(requests: int, seed: int) -> list[Case]:
    return [
        Case(f"{engine.name} {row.label}", partial(compute_row, row, requests, seed))
        for engine in ENGINES
        for row in list_rows(engine)
    ]


def _compare(rows: Sequence[Row]) -> list[Row]:
    return compare_gains(read_gains(__package__, "gains.toml"), rows, "rate")


SCLS = Reproduction(
    "Seven schedulers, slice lengths and numbers of workers: LLaMA2-13B on A100s, 20 requests/s",
    "Slice-Level Scheduling (SCLS, Cheng et al., 2024), §5, Fig. 12, 13, 15-19, 21 and 22",
    REQUESTS,
    _cases,
    (
        Column("engine", "Engine"),
        Column("label", "Scheduler"),
        Column("requests_per_s", "Requests/s", ".2f"),
        Column("response_mean_s", "Response s", ".1f"),
        Column("response_p95_s", "P95", ".1f"),
        Column("response_p99_s", "P99", ".1f"),
        Column("batch_size", "Batch", ".1f"),
        Column("padding_tokens", "Padding", ".0f"),
        Column("invalid_tokens", "Invalid", ".0f"),
        Column("completion_std_s", "Completion std s", ".2f"),
        Column("busy_share", "Busy", ".0%"),
    ),
    list,
    NOTES,
    _compare,
)
