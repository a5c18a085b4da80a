"""`foretoken tune`: searches the numbers of a preset on training traffic."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretoken.commands.offline.traffic import (
    ARRIVALS,
    ArrivalsOption,
    MaxTokensOption,
    PredictorOption,
    PresetsFileOption,
    ProcessesOption,
    RateOption,
    RequestsOption,
    open_workload,
    parse_presets,
)
from foretoken.commands.usage import (
    Conflict,
    UsageError,
    check_outputs,
    given_options,
    refuse_conflicts,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from simulator.engine.settings import RunSettings
    from simulator.study import Point
    from simulator.tuning.ranges import Range
    from simulator.tuning.tune import Tuned

WIDTH = 140  # columns that the tables need
MAX_TRIALS, MAX_SEEDS = 1_000, 64
CONFLICTS = (
    Conflict("rate", "load", "a load is a rate, as a factor of the measured capacity"),
    Conflict("trace", "workload", "each is the traffic"),
    Conflict("trace", "arrivals", "a trace has arrivals of its own"),
)


def tune(
    context: typer.Context,
    trace: Annotated[
        str, typer.Option(help="Training traces, separated by commas; see docs/simulator.md.")
    ] = "",
    workload: Annotated[
        str, typer.Option(help="Training workloads, as of simulate, separated by commas.")
    ] = "",
    test: Annotated[
        str, typer.Option(help="Traces to try the result on, once; the search never sees them.")
    ] = "",
    preset: Annotated[str, typer.Option(help="The preset to tune.")] = "foretoken",
    presets: PresetsFileOption = "",
    keys: Annotated[
        str,
        typer.Option(
            metavar="KEY[=LEAST:MOST],…",
            help="Numbers and their ranges, such as decay=0.2:1,slice_tokens; all without it.",
        ),
    ] = "",
    objective: Annotated[
        str,
        typer.Option(
            help="goodput, goodput_tokens, throughput, latency, ttft or e2e; the last three also "
            "with _p99."
        ),
    ] = "goodput",
    sla: Annotated[
        str, typer.Option(help="Budgets for goodput, such as ttft=1s,tpot=50ms,mtpot=500ms.")
    ] = "",
    hardware: Annotated[
        str, typer.Option(help="A hardware file, or the name of one that ships.")
    ] = "h100-llama3-8b",
    workers: Annotated[int, typer.Option(min=1, help="Workers of this hardware.")] = 1,
    requests: RequestsOption = 0,
    rate: RateOption = None,
    load: Annotated[
        str,
        typer.Option(
            metavar="A,B,…", help="Rates as factors of the measured capacity, such as 0.9,1.6."
        ),
    ] = "",
    arrivals: ArrivalsOption = ARRIVALS,
    max_tokens: MaxTokensOption = 4_096,
    predictor: PredictorOption = "",
    trials: Annotated[
        int, typer.Option(min=1, max=MAX_TRIALS, help="Settings to try, in addition to the start.")
    ] = 40,
    seeds: Annotated[
        int,
        typer.Option(min=1, max=MAX_SEEDS, help="Runs of each traffic; a workload is drawn anew."),
    ] = 2,
    seed: Annotated[int, typer.Option(min=0, help="Random seed; equal seeds, equal results.")] = 0,
    json: Annotated[Path | None, typer.Option(help="Write the results to this file.")] = None,
    processes: ProcessesOption = 0,
) -> None:
    """Tune the numbers of a preset: a bounded search by simulation, on training traffic only."""
    from foretoken.running.console.bar import ProgressBar
    from services.policies.preset import require_known
    from simulator.engine.settings import RunSettings
    from simulator.hardware.hardware_file import load_hardware
    from simulator.parallel import available_cores
    from simulator.report.sla import parse_sla
    from simulator.study import check_values
    from simulator.tuning.ranges import parse_ranges
    from simulator.tuning.tune import NEEDS_SLA, OBJECTIVES, make_scenarios
    from simulator.tuning.tune import tune as run

    refuse_conflicts(given_options(context), CONFLICTS)
    check_values("workers", [workers])
    require_known("objective", objective, OBJECTIVES)
    traces, tests = _paths(trace), _paths(test)
    check_outputs(json, inputs=[*traces, *tests, *map(Path, [*_names(workload), hardware])])
    chosen = parse_presets(preset, presets)
    if len(chosen) > 1:
        raise UsageError(f"--preset {preset}: tune one preset at a time")
    ranges = parse_ranges(keys, chosen[0], workers)
    budgets = parse_sla(sla)
    if objective in NEEDS_SLA and not sla:
        raise UsageError(f"--objective {objective} counts met SLAs: give --sla, such as ttft=1s")
    loads = _parse_loads(load)
    settings = RunSettings(
        chosen[0],
        (load_hardware(hardware),) * workers,
        budgets,
        max_tokens,
        predictor=predictor,
        seed=seed,
    )
    rate_drawn = rate or (1.0 if loads else None)  # drawn once, then stretched to each load
    traffic = _Traffic(settings, requests, rate_drawn, arrivals, seeds)
    training = traffic.of_traces(traces) if trace else traffic.of_workloads(_names(workload))
    testing = traffic.of_traces(tests)
    _refuse_tested(training, testing)
    cores = processes or available_cores()
    with ProgressBar("measuring capacity") as bar:
        scenarios = make_scenarios(training, loads, cores)
        test_scenarios = make_scenarios(testing, loads, cores)
        found = run(
            chosen[0],
            ranges,
            OBJECTIVES[objective],
            scenarios,
            test_scenarios,
            trials,
            seed,
            cores,
            bar.show,
        )
    _show(found, ranges, objective, json)


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")] if text else []
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"{text}: {name} is named twice; name each traffic once")
    return names


def _paths(text: str) -> list[Path]:
    return [Path(name) for name in _names(text)]


def _parse_loads(text: str) -> list[float]:
    try:
        loads = [float(value) for value in text.split(",")] if text else []
    except ValueError:
        loads = [0.0]
    if not all(0 < load <= 100 for load in loads):
        raise UsageError(f"--load {text}: use factors above 0 and up to 100, such as 0.9,1.6")
    return loads


class _Traffic:
    """Opens traffic as points: one for each seed."""

    def __init__(
        self,
        settings: "RunSettings",
        requests: int,
        rate: float | None,
        arrivals: str,
        seeds: int,
    ):
        self._settings, self._requests, self._rate = settings, requests, rate
        self._arrivals = arrivals
        self._seeds = range(settings.seed, settings.seed + seeds)

    def of_traces(self, traces: "Sequence[Path]") -> "list[Point]":
        from simulator.study import Point

        opened = [
            open_workload(path, "", self._requests, self._rate, self._arrivals, 0)
            for path in traces
        ]
        return [
            Point({}, replace(self._settings, seed=seed), each)
            for each in opened
            for seed in self._seeds
        ]

    def of_workloads(self, names: "Sequence[str]") -> "list[Point]":
        from simulator.study import Point

        return [
            Point(
                {},
                replace(self._settings, seed=seed),
                open_workload(None, name, self._requests, self._rate, self._arrivals, seed),
            )
            for name in names or [""]
            for seed in self._seeds
        ]


def _refuse_tested(training: "Sequence[Point]", testing: "Sequence[Point]") -> None:
    """Raises UsageError for a test trace with the requests of a training trace, whatever its name:
    a result on it says nothing about other traffic."""
    from simulator.tuning.tune import same_requests

    for point in testing:
        for trained in training:
            if same_requests(point.workload, trained.workload):
                raise UsageError(
                    f"--test {point.workload.name}: its requests are those of the training trace "
                    f"{trained.workload.name}; test on a trace that is not trained on"
                )


def _show(tuned: "Tuned", ranges: "Mapping[str, Range]", objective: str, json: Path | None) -> None:
    from rich.console import Console

    from simulator.rows import write_rows
    from simulator.tuning.report import (
        conclude,
        figures_table,
        numbers_table,
        result_rows,
        sensitivity_rows,
        settings_options,
        settings_toml,
        trial_rows,
    )

    console = Console()
    console.width = max(console.width, WIDTH)
    tried = len(tuned.found.trials)
    title = f"{tuned.preset.name}: {tried} settings, mean and range over runs"
    console.print(figures_table(tuned, title))
    console.print(numbers_table(tuned, ranges))
    for sentence in conclude(tuned, objective):
        console.print(sentence, highlight=False)
    if tuned.improved:
        print(f"\n{settings_toml(tuned.preset, tuned.best.setting)}\n")
        print(settings_options(tuned.best.setting))
    if json:
        write_rows(
            json,
            result_rows(tuned),
            start=[dict(tuned.start.setting)],
            best=[dict(tuned.best.setting)],
            sensitivity=sensitivity_rows(tuned),
            trials=trial_rows(tuned.found.trials),
        )
