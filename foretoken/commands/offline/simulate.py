"""`foretoken simulate`: runs presets on a workload in virtual time."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
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
from foretoken.commands.usage import (
    UsageError,
    check_outputs,
    check_plot_folder,
    given_options,
    refuse_conflicts,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from simulator.study import Finding, Point

WIDTH = 150  # columns that the table needs


def simulate(
    context: typer.Context,
    trace: TraceOption = None,
    workload: WorkloadOption = "",
    preset: Annotated[str, typer.Option(help="Presets to compare, separated by commas.")] = (
        "foretoken,fcfs"
    ),
    presets: PresetsFileOption = "",
    hardware: Annotated[
        str, typer.Option(help="A hardware file, or the name of one that ships.")
    ] = "h100-llama3-8b",
    workers: Annotated[int, typer.Option(min=1, help="Workers of this hardware.")] = 1,
    requests: RequestsOption = 0,
    rate: RateOption = None,
    arrivals: ArrivalsOption = ARRIVALS,
    clients: Annotated[
        int, typer.Option(min=0, help="A closed loop of this many clients instead of arrivals.")
    ] = 0,
    max_tokens: MaxTokensOption = 4_096,
    max_queue: Annotated[
        int, typer.Option(min=1, help="Waiting requests beyond which one is refused.")
    ] = 4_096,
    sla: Annotated[
        str, typer.Option(help="Budgets for goodput, such as ttft=1s,tpot=50ms,mtpot=500ms.")
    ] = "",
    predictor: PredictorOption = "",
    pure: Annotated[
        bool, typer.Option(help="The named predictor alone answers, as with predictor.pure.")
    ] = True,
    train: Annotated[
        int, typer.Option(min=0, help="Hold out the first requests, to train predictors on.")
    ] = 0,
    sweep: Annotated[
        str, typer.Option(metavar="KEY=A,B,…", help="Run at each value of a key, such as rate.")
    ] = "",
    seed: SeedOption = 0,
    json: Annotated[Path | None, typer.Option(help="Write the results to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write plots to this folder.")] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write a page with the tables and plots to this file.")
    ] = None,
    processes: ProcessesOption = 0,
) -> None:
    """Simulate presets on a trace or workload: the served scheduler in virtual time."""
    from simulator.engine.settings import ObservationLimits, RunSettings
    from simulator.hardware.hardware_file import load_hardware
    from simulator.parallel import available_cores
    from simulator.report.sla import parse_sla
    from simulator.study import Point, check_values, run_points, vary

    key, values = _parse_sweep(sweep)
    given = given_options(context)
    if not clients:
        given.discard("clients")  # --clients 0 is no closed loop
    if key in given:
        option = key.replace("_", "-")
        raise UsageError(f"give either --{option} or --sweep {key}=…: both set {key}")
    refuse_conflicts(given | {key}, CONFLICTS)
    check_values("workers", [workers])
    check_outputs(json, html, inputs=[trace, Path(workload), Path(hardware)])
    check_plot_folder(plot)
    one = load_hardware(hardware)
    chosen = parse_presets(preset, presets)
    budgets = parse_sla(sla)
    if key == "rate" and not trace:
        rate = values[0]  # arrivals are drawn once, then stretched
    if key == "clients":
        clients = int(values[0])
    requested = open_workload(trace, workload, requests, rate, arrivals, seed, clients)
    training, requested = requested.hold_out(train) if train else (None, requested)
    observe = ObservationLimits() if (plot or html) and not key else None
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
                observe=observe,
                training=training,
                pure=pure,
            ),
            requested,
        )
        for each in chosen
    ]
    if key:
        points = vary(points, key, values)
    with _progress(points) as on_done:
        findings = run_points(points, processes or available_cores(), on_done)
    _show(findings, points, json)
    if plot or html:
        from simulator.study_report import write_reports

        write_reports(points, findings, key, plot, html)


def _parse_sweep(text: str) -> tuple[str, list[float]]:
    """The key and its values, none of them if the text is empty."""
    from simulator.study import check_values

    if not text:
        return "", []
    key, _, values = text.partition("=")
    try:
        numbers = [float(value) for value in values.split(",")]
    except ValueError:
        raise UsageError(f"--sweep {text}: use KEY=A,B,…, such as rate=1,2,4") from None
    check_values(key, numbers)
    return key, numbers


@contextmanager
def _progress(points: "Sequence[Point]") -> "Iterator[Callable[[int], None]]":
    from foretoken.running.console.bar import ProgressBar

    with ProgressBar("simulating") as bar:
        done = count(1)
        yield lambda _: bar.show("simulating", next(done), len(points))


def _show(
    findings: "Sequence[Finding]",
    points: "Sequence[Point]",
    json: Path | None,
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
