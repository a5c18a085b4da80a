"""Traffic: options of the commands that simulate it, and the workload that they name."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretoken.commands.usage import Conflict, UsageError

if TYPE_CHECKING:
    from services.policies.preset import Preset
    from simulator.workload.workload import Workload

MAX_REQUESTS = 10_000_000  # memory for the columns of a workload
ARRIVALS = "poisson"  # the default of a workload
OWN_ARRIVALS = "a trace has arrivals of its own"
CLOSED_LOOP = "a client sends its next request when the previous one ends"
CONFLICTS = (
    Conflict("trace", "workload", "each is the traffic"),
    Conflict("trace", "arrivals", OWN_ARRIVALS),
    Conflict("clients", "rate", CLOSED_LOOP),
    Conflict("clients", "arrivals", CLOSED_LOOP),
)

TraceOption = Annotated[
    Path | None,
    typer.Option("--trace", help="CSV of requests, plain or .gz; see docs/simulator.md."),
]
WorkloadOption = Annotated[
    str,
    typer.Option(
        "--workload",
        help="d1, d2, d3, varying, codefuse, magnus, or a CSV with input_tokens,output_tokens.",
    ),
]
RequestsOption = Annotated[
    int,
    typer.Option(
        "--requests",
        min=0,
        max=MAX_REQUESTS,
        help="Requests; 0: the whole trace, or 1,000 of a workload.",
    ),
]
RateOption = Annotated[
    float | None,
    typer.Option("--rate", help="Requests per second; a trace is stretched to it."),
]
ArrivalsOption = Annotated[
    str,
    typer.Option("--arrivals", help="Arrivals of a workload: poisson, gamma, even or burst."),
]
MaxTokensOption = Annotated[
    int,
    typer.Option(
        "--max-tokens", min=1, help="max_tokens of every request; longer answers are cut."
    ),
]
PredictorOption = Annotated[
    str,
    typer.Option(
        "--predictor",
        help="Replace the presets' predictor; history, max and oracle need no prompts.",
    ),
]
SeedOption = Annotated[
    int, typer.Option("--seed", min=0, help="Random seed; equal seeds, equal results.")
]
ProcessesOption = Annotated[
    int, typer.Option("--processes", min=0, help="Runs at once; 0: one per core.")
]
PresetsFileOption = Annotated[
    str, typer.Option("--presets", metavar="FILE", help="TOML file with more presets.")
]


def parse_presets(text: str, file: str = "") -> "list[Preset]":
    """The presets of names separated by commas, shipped ones or those of a file. Raises UsageError
    for a name that is given twice, and ValueError for an unknown one."""
    from services.policies.preset import choose
    from services.policies.preset import presets as read_presets

    names = [name.strip() for name in text.split(",")]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"--preset {text}: {name} is named twice; name each preset once")
    known = read_presets(file)
    return [choose(name, known=known) for name in names]


def open_workload(
    trace: Path | None,
    name: str,
    requests: int,
    rate: float | None,
    arrivals: str,
    seed: int,
    clients: int = 0,
) -> "Workload":
    """Opens the traffic that the options describe: a trace, or a workload with drawn arrivals or a
    closed loop of `clients`. Raises UsageError or ValueError if the options describe none."""
    from simulator.study import check_values
    from simulator.workload.builtin import build_workload
    from simulator.workload.trace import read_trace

    if trace is None and not name:
        raise UsageError("give --trace FILE or --workload NAME")
    if rate is not None:
        check_values("rate", [rate])
    if trace is None:
        return build_workload(name, requests or 1_000, arrivals, rate or 0.0, clients, seed)
    workload = read_trace(trace, requests)
    if clients:
        return replace(workload, clients=clients)
    return workload.at_rate(rate) if rate else workload
