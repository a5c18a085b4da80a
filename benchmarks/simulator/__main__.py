"""Speed of the simulator: CPU time per request, its growth with the queue, and peak memory.

    python -m benchmarks.simulator [--presets a,b] [--requests N,M,…] [--lengths FILE] [--json FILE]
                                   [--plot FILE] [--quick]

Each run is a process of its own on one core. Capacity is the rate at which `fcfs` serves a burst.
The loads are 0.8 and 1.2 times that rate, with Poisson arrivals, and a burst: all requests queued
at the start. Above capacity the queue grows with the number of requests, from column to column.
Lengths follow a log-normal distribution like that of a chat service, or are drawn from a CSV with
input_tokens,output_tokens. Forecasts are those of `history`. Requests have an SLA of 2 s to the
first token and 0.1 s per token.
"""

import resource
import time
from argparse import Namespace
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from benchmarks.harness.report import parser, show, write
from services.core import Sla
from services.forecast import Ints
from services.policies.preset import choose
from simulator.engine.settings import RunSettings
from simulator.engine.simulation import simulate
from simulator.hardware.hardware_file import load_hardware
from simulator.workload.trace import read_lengths
from simulator.workload.workload import Workload

BURST = 0.0  # the factor of capacity of a burst
FACTORS = (0.8, 1.2, BURST)
SIZES, QUICK_SIZES = "1000,3000,10000,30000", "200,400"
CAPACITY_REQUESTS, QUICK_CAPACITY_REQUESTS = 3_000, 200
MEDIANS, SIGMAS = (500.0, 75.0), (0.9, 1.4)  # of input and output tokens
SLA = Sla("benchmark", 2.0, 0.1)


@dataclass(frozen=True)
class Case:
    """One run; a rate of 0 is a burst."""

    preset: str
    requests: int
    rate: float
    workers: int
    hardware: str
    lengths: Path | None


@dataclass(frozen=True)
class Cost:
    """CPU time of a run without its imports, peak memory with them, and the rate at which the
    simulated workers serve the first nine tenths of the requests: the others wait for the longest
    answers."""

    cpu_s: float
    ms_per_request: float
    rounds_per_request: float
    peak_mib: float
    served_per_s: float


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--presets", default="fcfs,foretoken", help="names, separated by commas")
    options.add_argument("--requests", default="", help=f"numbers of requests; default: {SIZES}")
    options.add_argument("--lengths", type=Path, help="CSV with input_tokens,output_tokens")
    options.add_argument("--plot", type=Path, help="write cost against requests to this PNG file")
    options.add_argument("--hardware", default="h100-llama3-8b")
    options.add_argument("--workers", type=int, default=4)
    args = options.parse_args()
    sizes = [int(n) for n in (args.requests or (QUICK_SIZES if args.quick else SIZES)).split(",")]
    capacity = QUICK_CAPACITY_REQUESTS if args.quick else CAPACITY_REQUESTS
    rate = measure(_case(args, "fcfs", capacity, BURST)).served_per_s
    print(f"capacity: {rate:.0f} requests/s on {args.workers} x {args.hardware}")
    records = []
    for preset in args.presets.split(","):
        rows: list[tuple[object, ...]] = []
        for factor in FACTORS:
            label = f"{factor:g} x capacity" if factor else "burst"
            costs = [measure(_case(args, preset, size, rate * factor)) for size in sizes]
            records += [
                {"preset": preset, "load": factor, "label": label, "requests": size, **asdict(cost)}
                for size, cost in zip(sizes, costs, strict=True)
            ]
            rows.append((label, *(f"{c.ms_per_request:.2f} ({c.peak_mib:.0f})" for c in costs)))
        head = ("load", *(f"{size:,} requests" for size in sizes))
        show(f"{preset}: CPU ms per request (peak MiB)", head, rows)
    write(args.json, {"capacity_per_s": rate, "runs": records})
    if args.plot:
        # Not imported above: the runs' processes would import it, too, and count its memory.
        from benchmarks.simulator.plot import draw

        draw(records, args.plot)


def _case(args: Namespace, preset: str, requests: int, rate: float) -> Case:
    return Case(preset, requests, rate, args.workers, args.hardware, args.lengths)


def measure(case: Case) -> Cost:
    """Runs a case in a fresh process: its peak memory includes no other run's."""
    with ProcessPoolExecutor(1, get_context("spawn")) as fresh:
        return fresh.submit(run, case).result()


def run(case: Case) -> Cost:
    workload = draw_workload(case)
    hardware = (load_hardware(case.hardware),) * case.workers
    settings = RunSettings(
        choose(case.preset), hardware, SLA, max_queue=case.requests, predictor="history"
    )
    began_s = time.process_time()
    result = simulate(settings, workload)
    cpu_s = time.process_time() - began_s
    return Cost(
        cpu_s,
        cpu_s / case.requests * 1e3,
        result.rounds / case.requests,
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        0.9 * case.requests / float(np.quantile(result.records.last_s, 0.9)),
    )


def draw_workload(case: Case) -> Workload:
    rng = np.random.default_rng(0)
    inputs, outputs = draw_lengths(case, rng)
    arrival_s = np.zeros(case.requests)
    if case.rate:
        arrival_s = np.cumsum(rng.exponential(1 / case.rate, case.requests))
    return Workload("benchmark", arrival_s, inputs, outputs)


def draw_lengths(case: Case, rng: np.random.Generator) -> tuple[Ints, Ints]:
    if case.lengths:
        inputs, outputs = read_lengths(case.lengths)
        rows = rng.integers(len(inputs), size=case.requests)
        return inputs[rows], outputs[rows]
    drawn = rng.lognormal(np.log(MEDIANS), SIGMAS, (case.requests, 2))
    inputs, outputs = np.clip(np.ceil(drawn), 1, 4_096).astype(np.int64).T
    return inputs, outputs


if __name__ == "__main__":
    main()
