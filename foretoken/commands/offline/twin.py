"""`foretoken twin`: simulates a recorded run again and shows the simulator's error."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretoken.commands.usage import UsageError, check_outputs, check_plot_folder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from simulator.hardware.hardware import Hardware
    from simulator.twin.recorded_run import RecordedRun

WIDTH = 110  # columns that the table needs


def twin(
    log: Annotated[
        Path, typer.Argument(help="Event log of a stack: serve --set scheduler.event_log=FILE.")
    ],
    hardware: Annotated[
        str,
        typer.Option(
            help="A hardware file, or the name of one that ships, for each worker; without it, the "
            "log's own step times and capacities."
        ),
    ] = "",
    predictor: Annotated[
        str,
        typer.Option(help="Replace the recorded forecasts: history, max or oracle."),
    ] = "",
    follow_speed: Annotated[
        bool,
        typer.Option(
            "--follow-speed",
            help="Slow steps down where those of the log were slow, which leaves out the error of "
            "a machine with varying speed.",
        ),
    ] = False,
    sla: Annotated[
        str, typer.Option(help="Budgets for goodput, instead of those of the requests.")
    ] = "",
    json: Annotated[Path | None, typer.Option(help="Write the figures to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a plot to this folder.")] = None,
    write_hardware: Annotated[
        Path | None,
        typer.Option(help="Write the first worker's hardware as a file, to simulate other runs."),
    ] = None,
) -> None:
    """Simulate a recorded run again and print the simulator's error.

    The requests, their arrivals and lengths, the preset and the workers are those of the event log.
    """
    from rich.console import Console

    from simulator.hardware.hardware_file import SUFFIX
    from simulator.report.sla import parse_sla
    from simulator.twin.comparison import compare
    from simulator.twin.recorded_run import read_run
    from simulator.twin.report import twin_rows, twin_table
    from simulator.twin.twin import simulate_twin

    check_outputs(json, write_hardware, inputs=[log, Path(hardware)])
    check_plot_folder(plot)
    if write_hardware and write_hardware.suffix != SUFFIX:
        raise UsageError(
            f"--write-hardware {write_hardware}: a hardware file's name ends in {SUFFIX}"
        )
    budgets = parse_sla(sla) if sla else None
    recorded = read_run(log)
    run = recorded.run
    workers = _hardware(hardware, run)
    made = simulate_twin(recorded, workers, run.timing, predictor, follow_speed)
    comparison = compare(run, made, budgets)
    console = Console()
    console.width = max(console.width, WIDTH)
    console.print(twin_table(comparison, f"{log.name}: {_describe(recorded.preset.name, run)}"))
    console.print(_explain(workers, run, comparison.left_out), highlight=False)
    if json:
        from simulator.rows import write_rows

        write_rows(json, twin_rows(comparison))
    if plot:
        from simulator.report.figure import write_png
        from simulator.report.plots import plot_distributions

        runs = {"measured": run.records.select(made.places), "simulated": made.records}
        write_png(plot / "twin.png", plot_distributions(runs))
    if write_hardware:
        from simulator.hardware.hardware_file import write_hardware as write
        from simulator.rows import writing

        with writing(write_hardware):
            write_hardware.write_text(write(workers[0]), encoding="utf-8")


def _hardware(given: str, run: "RecordedRun") -> "tuple[Hardware, ...]":
    from simulator.hardware.hardware_file import load_hardware
    from simulator.twin.twin import measured_hardware

    return (load_hardware(given),) * len(run.workers) if given else measured_hardware(run)


def _describe(preset: str, run: "RecordedRun") -> str:
    workers = len(run.workers)
    return f"{preset}, {len(run.workload):,} requests, {workers} worker{'s' if workers > 1 else ''}"


def _explain(workers: "Sequence[Hardware]", run: "RecordedRun", left_out: int) -> str:
    """What the twin was simulated with."""
    cost, timing = workers[0].cost, run.timing
    lines = [
        f"step: {1e3 * cost.base_s:.3g} ms + {1e3 * cost.prefill_token_s:.3g} ms per prompt token "
        f"+ {1e3 * cost.decode_seq_s:.3g} ms per row + {1e6 * cost.context_token_s:.3g} µs per "
        f"context token; {workers[0].source or workers[0].name}",
        f"control plane: message {1e3 * timing.hop_s:.2g} ms, round {1e3 * timing.round_s:.2g} ms "
        f"+ {1e6 * timing.round_job_s:.2g} µs per request, {1e3 * timing.wake_s:.2g} ms after due",
    ]
    if left_out:
        lines.append(f"left out: {left_out} requests that did not finish in both runs")
    return "\n".join(lines)
