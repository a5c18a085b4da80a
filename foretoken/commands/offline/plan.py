"""`foretoken plan`: how many workers of which hardware keep an SLA on some traffic."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretoken.commands.offline.traffic import (
    ARRIVALS,
    CONFLICTS,
    ArrivalsOption,
    MaxTokensOption,
    PredictorOption,
    PresetsFileOption,
    ProcessesOption,
    RateOption,
    RequestsOption,
    SeedOption,
    TraceOption,
    WorkloadOption,
    open_workload,
    parse_presets,
)
from foretoken.commands.usage import check_outputs, given_options, refuse_conflicts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from simulator.capacity.plan import Plan

WIDTH = 140  # columns that the table needs


def plan(
    context: typer.Context,
    sla: Annotated[
        str,
        typer.Option(help="Budgets and the percentage that meets them: ttft=1s,tpot=50ms,p=99."),
    ],
    trace: TraceOption = None,
    workload: WorkloadOption = "",
    hardware: Annotated[
        str, typer.Option(help="Hardware files or names of shipped ones, separated by commas.")
    ] = "h100-llama3-8b",
    preset: Annotated[str, typer.Option(help="Presets, separated by commas.")] = "foretoken",
    presets: PresetsFileOption = "",
    max_workers: Annotated[int, typer.Option(min=1, help="Most workers to try.")] = 64,
    requests: RequestsOption = 0,
    rate: RateOption = None,
    arrivals: ArrivalsOption = ARRIVALS,
    max_tokens: MaxTokensOption = 4_096,
    predictor: PredictorOption = "",
    seed: SeedOption = 0,
    json: Annotated[Path | None, typer.Option(help="Write the plans to this file.")] = None,
    processes: ProcessesOption = 0,
) -> None:
    """Find the fewest workers that keep an SLA, what they carry and what they cost.

    Simulates the whole traffic on each number of workers that it tries, for every hardware and
    preset.
    """
    from foretoken.running.console.bar import ProgressBar
    from simulator.capacity.plan import Candidate
    from simulator.capacity.plan import plan as run
    from simulator.engine.settings import RunSettings
    from simulator.hardware.hardware_file import load_hardware
    from simulator.parallel import available_cores
    from simulator.report.sla import parse_target
    from simulator.study import Point, check_values

    refuse_conflicts(given_options(context), CONFLICTS)
    check_values("workers", [max_workers])
    names = [name.strip() for name in hardware.split(",")]
    check_outputs(json, inputs=[trace, Path(workload), *map(Path, names)])
    target = parse_target(sla)
    kinds = [load_hardware(name) for name in names]
    chosen = parse_presets(preset, presets)
    traffic = open_workload(trace, workload, requests, rate, arrivals, seed)
    settings = [
        RunSettings(each, (kind,), target.sla, max_tokens, predictor=predictor, seed=seed)
        for kind in kinds
        for each in chosen
    ]
    candidates = [
        Candidate(Point({}, each, traffic), target.share, max_workers) for each in settings
    ]
    with ProgressBar("simulating") as bar:
        plans = run(candidates, processes or available_cores(), bar.show)
    share = f"{100 * target.share:g} % of {len(traffic):,} requests"
    _show(plans, f"{traffic.name}: {share} at {traffic.rate:.3g}/s meet {sla}", json)


def _show(plans: "Sequence[Plan]", title: str, json: Path | None) -> None:
    from rich.console import Console

    from simulator.capacity.report import explain, plan_row, plan_table
    from simulator.rows import write_rows

    console = Console()
    console.width = max(console.width, WIDTH)
    console.print(plan_table(plans, title))
    for sentence in filter(None, map(explain, plans)):
        print(sentence)
    if json:
        write_rows(json, [plan_row(plan) for plan in plans])
