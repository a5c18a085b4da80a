"""One self-contained HTML page about several runs."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from math import isfinite
from pathlib import Path
from typing import TypeVar

from jinja2 import Environment, StrictUndefined

from services.core import Sla
from services.policies.preset import CHOICES
from simulator.engine.settings import RunSettings
from simulator.report.comparison import Rows, compare
from simulator.report.figure import Picture, draw_svg
from simulator.report.sla import FIELDS
from simulator.rows import writing
from simulator.workload.workload import Workload

T = TypeVar("T")


@dataclass(frozen=True)
class SimulatedRun:
    """The settings and the workload of one run."""

    settings: RunSettings
    workload: Workload


def write_page(
    path: Path, runs: Sequence[SimulatedRun], rows: Rows, pictures: Sequence[Picture]
) -> None:
    """Writes the page: settings, comparison and pictures. It refers to nothing outside itself, and
    equal runs give equal bytes. Raises ValueError if the file cannot be written."""
    environment = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    template = environment.from_string(files(__package__).joinpath("page.html").read_text("utf-8"))
    content = template.render(
        title=f"{_each(runs, _workload)} on {_each(runs, _hardware)}",
        settings=[(name, _each(runs, show)) for name, show in SETTINGS.items()],
        preset_titles=("preset", "about", "policies", "parameters"),
        presets=_distinct(_describe(run.settings) for run in runs),
        tables=compare(rows),
        pictures=[(picture, draw_svg(picture.figure)) for picture in pictures],
    )
    with writing(path):
        path.write_text(content, "utf-8")


# Settings of a run


def _workload(run: SimulatedRun) -> str:
    return f"{run.workload.name}: {len(run.workload):,} requests"


def _hardware(run: SimulatedRun) -> str:
    hardware = run.settings.hardware
    return f"{len(hardware)} × {hardware[0].name}"


def _load(run: SimulatedRun) -> str:
    workload = run.workload
    if workload.clients:
        return f"closed loop of {workload.clients:,} clients"
    return f"{workload.rate:.4g} requests/s" if isfinite(workload.rate) else "all at once"


def _lengths(run: SimulatedRun) -> str:
    inputs, outputs = run.workload.input_tokens.mean(), run.workload.output_tokens.mean()
    return f"mean {inputs:,.0f} input and {outputs:,.0f} output tokens"


def _sla(sla: Sla) -> str:
    budgets = {name: getattr(sla, attribute) for name, attribute in FIELDS.items()}
    shown = [f"{name.upper()} {value:g} s" for name, value in budgets.items() if isfinite(value)]
    return ", ".join(shown) or "none: goodput counts all finished requests"


SETTINGS: dict[str, Callable[[SimulatedRun], str]] = {
    "workload": _workload,
    "load": _load,
    "lengths": _lengths,
    "hardware": _hardware,
    "about the hardware": lambda run: run.settings.hardware[0].about,
    "source of its figures": lambda run: run.settings.hardware[0].source,
    "KV capacity of a worker": lambda run: f"{run.settings.hardware[0].kv_tokens:,} tokens",
    "SLA": lambda run: _sla(run.settings.sla),
    "max_tokens": lambda run: f"{run.settings.max_tokens:,}",
    "max_queue": lambda run: f"{run.settings.max_queue:,}",
    "predictor": lambda run: run.settings.predictor or "each preset's own",
    "seed": lambda run: f"{run.settings.seed}",
}


def _each(runs: Sequence[SimulatedRun], show: Callable[[SimulatedRun], str]) -> str:
    """The distinct values of a setting."""
    return "; ".join(_distinct(show(run) for run in runs))


def _describe(settings: RunSettings) -> tuple[str, ...]:
    """The cells of a preset."""
    preset = replace(settings.preset, predictor=settings.predictor_name)
    choices = ", ".join(f"{name} {getattr(preset, name)}" for name in CHOICES)
    known = preset.known_params()
    params = ", ".join(f"{name} {known[name].shown(v)}" for name, v in preset.params.items())
    return preset.name, preset.about, choices, params


def _distinct(values: Iterable[T]) -> list[T]:
    return list(dict.fromkeys(values))
