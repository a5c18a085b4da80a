"""Every preset for continuous batches on real traces, with tight and with ample memory.

    python -m benchmarks.traces --folder FOLDER [--traces a,b] [--presets a,b] [--requests N]
        [--loads 1,1.6] [--seed S] [--processes N] [--json FILE] [--quick]

FOLDER has the files of TRACES: CSV with arrival_s,input_tokens,output_tokens. Of each, the window
of N requests from its middle is simulated, without requests of more than MOST_TOKENS, on one
`h100-llama3-8b`. No prefix is shared.

  ample   KV memory and slots for all requests of the window at once: no request waits for memory.
          Its capacity is that of the hardware as it ships, measured with `fcfs`.
  tight   a quarter of the peak of the KV in use with ample memory at that capacity, and no less
          than the longest request needs. Its capacity is measured with this memory.

Arrivals are stretched to factors of the capacity. Presets with a predictor that reads prompts
get modelled forecasts, since traces have no prompts: calibrated distributions with the Kendall's
tau that `words` reaches on text (TAU). The others keep `history`, `max` or the true lengths.
Goodput is the share of all requests within the budgets of class standard. `of oracle` is that
goodput over that of `foretoken` with true lengths. Nothing is refused.
"""

import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from statistics import fmean

import numpy as np

from benchmarks.harness.report import parser, show, write
from gateway.config import SLA_CLASSES
from services.policies.preset import Preset, choose, presets
from services.predictor.predictors import READS
from simulator.capacity.measured import UNBOUNDED, measure_capacity
from simulator.engine.given import GIVEN
from simulator.engine.settings import RunSettings
from simulator.hardware.hardware import Hardware
from simulator.hardware.hardware_file import load_hardware
from simulator.papers.modelled import spread_lengths
from simulator.parallel import available_cores, run_parallel
from simulator.report.summary import Summary, summary_row
from simulator.rows import Row
from simulator.study import Point, run_points
from simulator.workload.trace import read_trace
from simulator.workload.workload import Workload

TRACES = {
    "azure-conv": "azure2023_conv.csv.gz",
    "azure-code": "azure2023_code.csv.gz",
    "mooncake": "mooncake_conversation.csv.gz",
    "servegen": "servegen_m_large_day2.csv.gz",
    "deepseek-r1": "servegen_deepseek_r1.csv.gz",
}
HARDWARE = "h100-llama3-8b"
REQUESTS, QUICK_REQUESTS = 1_500, 60
MOST_TOKENS = 32_768  # of a request, prompt and answer
MARGIN_TOKENS = 64  # blocks that are not full
SHARE = 4  # tight memory is this part of the demand
TAU = 0.356  # `words` on 656 unseen ShareGPT turns, `foretoken evaluate`, 2026-11-25
SLA = SLA_CLASSES["standard"].named("standard")
FORETOKEN, ORACLE = "foretoken", "foretoken-oracle"
# Equal to another one here: on one worker, and with a modelled predictor.
LEFT_OUT = frozenset({"ils", "ltr-classify"})
WIDTH = 150
COLUMNS = (  # key, heading, format
    ("goodput", "goodput", ".1%"),
    ("of_oracle", "of oracle", ".0%"),
    ("token_latency_mean_s", "s/token", ".3g"),
    ("token_latency_p99_s", "p99", ".3g"),
    ("ttft_mean_s", "TTFT s", ".3g"),
    ("ttft_p99_s", "p99", ".3g"),
    ("e2e_mean_s", "E2E s", ".3g"),
    ("e2e_p99_s", "p99", ".3g"),
    ("output_tokens_per_s", "tokens/s", ",.0f"),
    ("preemptions", "preempted", ",d"),
    ("evictions", "evicted", ",d"),
)


@dataclass(frozen=True)
class Setup:
    """A window of a trace on tight or ample memory, and its capacity in requests per second."""

    trace: str
    memory: str
    hardware: Hardware
    window: Workload
    capacity: float


def names() -> list[str]:
    """The presets that serve continuous batches, and `foretoken` with true lengths."""
    known = presets()
    return [
        *(n for n in known if known[n].arrangement == "continuous" and n not in LEFT_OUT),
        ORACLE,
    ]


def read_window(path: Path, name: str, requests: int, seed: int) -> Workload:
    """The requests in the middle of a trace, with modelled forecasts. The longest are left out."""
    whole = read_trace(path)
    fits = np.flatnonzero(whole.input_tokens + whole.output_tokens <= MOST_TOKENS)
    first = max(0, (len(fits) - requests) // 2)
    window = whole.take(fits[first : first + requests])
    forecasts = spread_lengths(window.output_tokens, TAU, np.random.default_rng([seed, 3]))
    return replace(
        window, name=name, arrival_s=window.arrival_s - window.arrival_s[0], forecasts=forecasts
    )


def prepare(path: Path, name: str, requests: int, seed: int) -> list[Setup]:
    """Measures demand and capacities of a trace: three runs with `fcfs`."""
    window = read_window(path, name, requests, seed)
    shipped = replace(load_hardware(HARDWARE), max_context_tokens=MOST_TOKENS)
    longest = window.input_tokens + window.output_tokens + MARGIN_TOKENS
    ample = replace(shipped, kv_tokens=int(longest.sum()), max_running=len(window))
    shipped_capacity = measure_capacity(_point(choose("fcfs"), shipped, window, seed))
    steady = window.at_rate(shipped_capacity)
    [found] = run_points([_point(choose("fcfs"), ample, steady, seed)], 1)
    demand_tokens = found.summary.kv_peak_share * ample.kv_tokens
    kv_tokens = max(int(demand_tokens / SHARE), int(longest.max()))
    tight = replace(shipped, kv_tokens=kv_tokens)
    tight_capacity = measure_capacity(_point(choose("fcfs"), tight, window, seed))
    return [
        Setup(name, "tight", tight, window, tight_capacity),
        Setup(name, "ample", ample, window, shipped_capacity),
    ]


def _point(preset: Preset, hardware: Hardware, workload: Workload, seed: int) -> Point:
    predictor = GIVEN if preset.predictor in READS else ""
    settings = RunSettings(
        preset,
        (hardware,),
        SLA,
        MOST_TOKENS,
        UNBOUNDED,
        predictor,
        seed=seed,
    )
    return Point({}, settings, workload)


def make_point(name: str, setup: Setup, load: float, seed: int) -> Point:
    """A preset at a load; ORACLE is `foretoken` with true lengths."""
    preset = choose(FORETOKEN if name == ORACLE else name)
    point = _point(preset, setup.hardware, setup.window.at_rate(load * setup.capacity), seed)
    if name != ORACLE:
        return point
    return replace(point, settings=replace(point.settings, predictor="oracle"))


def make_rows(found: Sequence[tuple[str, Setup, float, Summary]]) -> list[Row]:
    """A row per run, with the share of the oracle's goodput; None without the oracle."""
    oracles = {
        (setup.trace, setup.memory, load): summary.goodput
        for name, setup, load, summary in found
        if name == ORACLE
    }
    rows: list[Row] = []
    for name, setup, load, summary in found:
        oracle = oracles.get((setup.trace, setup.memory, load))
        of_oracle = summary.goodput / oracle if oracle else None
        place = {"trace": setup.trace, "memory": setup.memory, "load": load}
        rows.append({**place, **summary_row(summary), "preset": name, "of_oracle": of_oracle})
    return rows


def main() -> None:
    args = _options()
    chosen = args.presets.split(",") if args.presets else names()
    traces = args.traces.split(",") if args.traces else list(TRACES)
    if unknown := [each for each in (*chosen, *traces) if each not in (*names(), *TRACES)]:
        raise SystemExit(f"unknown {unknown[0]!r}; known: {', '.join((*TRACES, *names()))}")
    loads = [float(load) for load in args.loads.split(",")]
    requests = args.requests or (QUICK_REQUESTS if args.quick else REQUESTS)
    processes = args.processes or available_cores()
    tasks = [
        partial(prepare, args.folder / TRACES[name], name, requests, args.seed) for name in traces
    ]
    setups = [each for pair in run_parallel(tasks, processes, lambda _: None) for each in pair]
    for setup in setups:
        print(f"{setup.trace}, {setup.memory}: {_describe(setup)}", flush=True)
    rows: list[Row] = []
    for setup in setups:  # the record has all rows so far, whatever happens to a later one
        rows += _measure(setup, loads, chosen, args.seed, processes)
        for load in loads:
            _show(setup, load, rows)
        write(args.json, _record(requests, args.seed, setups, rows))
    print(f"Modelled forecasts: calibrated, Kendall's tau {TAU}, as `words` on ShareGPT turns.")


def _measure(
    setup: Setup, loads: Sequence[float], chosen: Sequence[str], seed: int, processes: int
) -> list[Row]:
    runs = [(name, setup, load) for load in loads for name in chosen]
    done = count(1)
    findings = run_points(
        [make_point(*run, seed) for run in runs],
        processes,
        lambda place: print(
            f"{setup.trace}, {setup.memory}: {next(done)} of {len(runs)}, {runs[place][0]}",
            file=sys.stderr,
            flush=True,
        ),
    )
    return make_rows([(*run, finding.summary) for run, finding in zip(runs, findings, strict=True)])


def _record(
    requests: int, seed: int, setups: Sequence[Setup], rows: Sequence[Row]
) -> dict[str, object]:
    return {
        "hardware": HARDWARE,
        "requests": requests,
        "seed": seed,
        "forecast_tau": TAU,
        "sla": {"ttft_s": SLA.ttft_s, "tpot_s": SLA.tpot_s, "mtpot_s": SLA.mtpot_s},
        "setups": [
            {
                "trace": each.trace,
                "memory": each.memory,
                "requests": len(each.window),
                "kv_tokens": each.hardware.kv_tokens,
                "requests_per_s": each.capacity,
                "input_tokens": float(each.window.input_tokens.mean()),
                "output_tokens": float(each.window.output_tokens.mean()),
            }
            for each in setups
        ],
        "rows": rows,
    }


def _describe(setup: Setup) -> str:
    window = setup.window
    tokens = fmean((window.input_tokens + window.output_tokens).tolist())
    return (
        f"{setup.hardware.kv_tokens:,} KV tokens, {len(window):,} requests of {tokens:,.0f} "
        f"tokens, capacity {setup.capacity:.3g} requests/s"
    )


def _show(setup: Setup, load: float, rows: Sequence[Row]) -> None:
    place = (setup.trace, setup.memory, load)
    shown = [row for row in rows if (row["trace"], row["memory"], row["load"]) == place]
    cells = [
        (row["preset"], *(_cell(row[key], style) for key, _, style in COLUMNS)) for row in shown
    ]
    head = ("preset", *(heading for _, heading, _ in COLUMNS))
    show(f"{setup.trace}, {setup.memory} memory, {load:g} × capacity", head, cells, WIDTH)


def _cell(value: object, style: str) -> str:
    return "–" if value is None else format(value, style)


def _options() -> Namespace:
    options = parser(__doc__)
    add = options.add_argument
    add("--folder", type=Path, required=True, help="the folder of the traces")
    add("--traces", default="", help=f"default: {','.join(TRACES)}")
    add("--presets", default="", help=f"names; default: all for continuous batches and {ORACLE}")
    add("--requests", type=int, default=0, help=f"of each trace; default: {REQUESTS}")
    add("--loads", default="1,1.6", help="factors of the capacity; default: 1,1.6")
    add("--seed", type=int, default=0)
    add("--processes", type=int, default=0, help="runs at once; default: one per core")
    return options.parse_args()


if __name__ == "__main__":
    main()
