"""`foretoken simulate`: runs presets on a workload in virtual time."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretoken.commands.usage import UsageError, require_folders

if TYPE_CHECKING:
    from collections.abc import Callable

    from simulator.study import Finding, Point
    from simulator.workload.workload import Workload

WIDTH = 150  # columns that the table needs


def simulate(
    trace: Annotated[
        Path | None, typer.Option(help="CSV of requests, plain or .gz; see docs/simulator.md.")
    ] = None,
    workload: Annotated[
        str, typer.Option(help="d1, d2, d3, varying, or a CSV with input_tokens,output_tokens.")
    ] = "",
    preset: Annotated[str, typer.Option(help="Presets to compare, separated by commas.")] = (
        "foretoken,fcfs"
    ),
    hardware: Annotated[
        str, typer.Option(help="A hardware file, or the name of one that ships.")
    ] = "h100-llama3-8b",
    workers: Annotated[int, typer.Option(min=1, help="Workers of this hardware.")] = 1,
    requests: Annotated[
        int, typer.Option(min=0, help="Requests; 0: the whole trace, or 1,000 of a workload.")
    ] = 0,
    rate: Annotated[
        float, typer.Option(min=0, help="Requests per second; a trace is stretched to it.")
    ] = 0.0,
    arrivals: Annotated[
        str, typer.Option(help="Arrivals of a workload: poisson, gamma, even or burst.")
    ] = "poisson",
    clients: Annotated[
        int, typer.Option(min=0, help="A closed loop of this many clients instead of arrivals.")
    ] = 0,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="max_tokens of every request; longer answers are cut.")
    ] = 4_096,
    max_queue: Annotated[
        int, typer.Option(min=1, help="Waiting requests beyond which one is refused.")
    ] = 4_096,
    sla: Annotated[
        str, typer.Option(help="Budgets for goodput, such as ttft=1s,tpot=50ms,mtpot=500ms.")
    ] = "",
    predictor: Annotated[
        str, typer.Option(help="Replace the presets' predictor: history, max, words, ranker …")
    ] = "",
    pure: Annotated[
        bool, typer.Option(help="The named predictor alone answers, as with predictor.pure.")
    ] = True,
    train: Annotated[
        int, typer.Option(min=0, help="Hold out the first requests, to train predictors on.")
    ] = 0,
    sweep: Annotated[
        str, typer.Option(metavar="KEY=A,B,…", help="Run at each value of a key, such as rate.")
    ] = "",
    seed: Annotated[int, typer.Option(min=0, help="Random seed; equal seeds, equal results.")] = 0,
    json: Annotated[Path | None, typer.Option(help="Write the results to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write plots to this folder.")] = None,
    processes: Annotated[int, typer.Option(min=0, help="Runs at once; 0: one per core.")] = 0,
) -> None:
    """Simulate presets on a trace or workload: the served scheduler in virtual time."""
    from services.policies.preset import choose
    from simulator.engine.settings import RunSettings
    from simulator.hardware.hardware_file import load_hardware
    from simulator.parallel import available_cores
    from simulator.report.sla import parse_sla
    from simulator.study import Point, run_points, vary

    require_folders(json)
    if plot and not plot.is_dir():
        raise UsageError(f"--plot: the folder does not exist; create it (got '{plot}')")
    one = load_hardware(hardware)
    chosen = [choose(name.strip()) for name in preset.split(",")]
    budgets = parse_sla(sla)
    requested = _open_workload(trace, workload, requests, rate, arrivals, clients, seed)
    training, requested = requested.hold_out(train) if train else (None, requested)
    points = [
        Point(
            {},
            RunSettings(
                each,
                (one,) * workers,
                budgets,
                max_tokens,
                max_queue,
                predictor,
                seed=seed,
                training=training,
                pure=pure,
            ),
            requested,
        )
        for each in chosen
    ]
    key, values = _parse_sweep(sweep)
    if key:
        points = vary(points, key, values)
    with _progress(points) as on_done:
        findings = run_points(points, processes or available_cores(), on_done)
    _show(findings, points, key, json, plot)


def _open_workload(
    trace: Path | None,
    name: str,
    requests: int,
    rate: float,
    arrivals: str,
    clients: int,
    seed: int,
) -> "Workload":
    from dataclasses import replace

    from simulator.workload.builtin import build_workload
    from simulator.workload.trace import read_trace

    if (trace is None) == (not name):
        raise UsageError("give either --trace FILE or --workload NAME")
    if trace is None:
        return build_workload(name, requests or 1_000, arrivals, rate, clients, seed)
    workload = read_trace(trace, requests)
    if clients:
        return replace(workload, clients=clients)
    return workload.at_rate(rate) if rate else workload


def _parse_sweep(text: str) -> tuple[str, list[float]]:
    if not text:
        return "", []
    key, _, values = text.partition("=")
    try:
        return key, [float(value) for value in values.split(",")]
    except ValueError:
        raise UsageError(f"--sweep {text}: use KEY=A,B,…, such as rate=1,2,4") from None


@contextmanager
def _progress(points: "Sequence[Point]") -> "Iterator[Callable[[int], None]]":
    from foretoken.commands.progress import ProgressBar

    with ProgressBar("simulating") as bar:
        done = count(1)
        yield lambda _: bar.show("simulating", next(done), len(points))


def _show(
    findings: "Sequence[Finding]",
    points: "Sequence[Point]",
    key: str,
    json: Path | None,
    plot: Path | None,
) -> None:
    from rich.console import Console

    from simulator.report.summary import summary_row, summary_table
    from simulator.study import describe_shortages

    rows = [(finding.keys, finding.summary) for finding in findings]
    settings, workload = points[0].settings, points[0].workload
    console = Console()
    console.width = max(console.width, WIDTH)
    title = (
        f"{workload.name}: {len(workload):,} requests on {len(settings.hardware)} × "
        f"{settings.hardware[0].name}"
    )
    console.print(summary_table(rows, title))
    warnings = describe_shortages(points)
    for sentence in warnings:
        console.print(f"warning: {sentence}", highlight=False)
    if json:
        from simulator.rows import write_rows

        noted = {"warnings": [{"warning": text} for text in warnings]} if warnings else {}
        write_rows(json, [summary_row(summary, keys) for keys, summary in rows], **noted)
    if plot:
        from simulator.report.plots import plot_distributions, plot_sweep

        if key:
            plot_sweep(plot / f"{key}.png", key, rows)
        else:
            runs = {finding.summary.preset: finding.records for finding in findings}
            plot_distributions(plot / "latency.png", runs)
