"""The makespan of an offline job by the order in which its requests begin, simulated.

    python -m benchmarks.offline.makespan --folder FOLDER [--requests N] [--in-flight A,B]
        [--preset NAME] [--seed S] [--json FILE] [--quick]

FOLDER has the files of `jobs.FILES`. N prompts are a job. `words` forecasts their answers after it
has learned from as many others. `in-flight` clients, each with one request at a time, take the
requests in an order, on one `h100-llama3-8b`. `longest known` is the order by the true lengths.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.harness.report import parser, show, write
from benchmarks.offline.jobs import HARDWARE, MOST_TOKENS, read_job
from services.core import Request
from services.forecast import Floats, Ints
from services.policies.preset import presets
from simulator.engine.forecaster import build_forecaster
from simulator.engine.settings import MODEL, RunSettings
from simulator.engine.simulation import simulate
from simulator.hardware.hardware_file import load_hardware
from simulator.workload.workload import Workload

QUICK_REQUESTS = 100


def forecast_tokens(settings: RunSettings, job: Workload) -> Floats:
    """The expected length of each answer before any of them has begun."""
    forecaster = build_forecaster(settings, job, lambda row: int(job.output_tokens[int(row)]))
    requests = [
        Request(str(row), MODEL, tokens, MOST_TOKENS, 0.0)
        for row, tokens in enumerate(job.input_tokens.tolist())
    ]
    return np.array([each.mean(most=MOST_TOKENS) for each in forecaster.forecast(requests)])


def reorder(job: Workload, rows: Ints, clients: int) -> Workload:
    """The job in this order, as a closed loop."""
    return replace(
        job,
        input_tokens=job.input_tokens[rows],
        output_tokens=job.output_tokens[rows],
        prompts=[job.prompts[row] for row in rows.tolist()],
        clients=clients,
    )


def measure(
    folder: Path, count: int, in_flight: Sequence[int], preset: str, seed: int
) -> dict[str, dict[str, float]]:
    """Makespans in seconds, by the bound on requests in flight and by order."""
    both = read_job(folder, 2 * count, seed)
    training, job = both.take(np.arange(count)), both.take(np.arange(count, 2 * count))
    hardware = load_hardware(HARDWARE)
    settings = RunSettings(presets()[preset], (hardware,), predictor="words", training=training)
    expected = forecast_tokens(settings, job)
    orders = {
        "arrival": np.arange(count),
        "longest forecast": np.argsort(-expected, kind="stable"),
        "longest known": np.argsort(-job.output_tokens, kind="stable"),
        "shortest forecast": np.argsort(expected, kind="stable"),
    }
    return {
        str(clients): {
            name: simulate(settings, reorder(job, rows, clients)).end_s
            for name, rows in orders.items()
        }
        for clients in in_flight
    }


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--folder", type=Path, required=True, help="the folder of the prompts")
    arguments.add_argument("--requests", type=int, default=1_000)
    arguments.add_argument("--in-flight", default="64")
    arguments.add_argument("--preset", default="foretoken")
    arguments.add_argument("--seed", type=int, default=1)
    args = arguments.parse_args()
    count = QUICK_REQUESTS if args.quick else args.requests
    in_flight = [int(text) for text in args.in_flight.split(",")]
    found = measure(args.folder, count, in_flight, args.preset, args.seed)
    names = list(next(iter(found.values())))
    show(
        f"makespan in s, {count:,} requests, {args.preset}, {HARDWARE}",
        ["in flight", *names],
        [
            [clients, *(f"{makespans[name]:.2f}" for name in names)]
            for clients, makespans in found.items()
        ],
    )
    write(args.json, found)


if __name__ == "__main__":
    main()
