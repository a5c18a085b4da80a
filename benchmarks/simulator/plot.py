"""Plots the simulator's cost per request against the number of requests."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from simulator.report.figure import (
    add_legend,
    label_axes,
    line_styles,
    new_figure,
    scale_x_log,
    write_png,
)

HEIGHT_IN = 4.0


def draw(runs: Sequence[Mapping[str, Any]], out: Path) -> None:
    """Writes a PNG of the runs that `benchmarks.simulator` records: a panel for each preset, a line
    for each load. Raises ValueError if the file cannot be written."""
    presets = list(dict.fromkeys(run["preset"] for run in runs))
    styles = line_styles(run["label"] for run in runs)
    figure = new_figure(HEIGHT_IN)
    panels = figure.subplots(1, len(presets), squeeze=False)[0]
    for axes, preset in zip(panels, presets, strict=True):
        for label, style in styles.items():
            line = [run for run in runs if (run["preset"], run["label"]) == (preset, label)]
            axes.plot(
                [run["requests"] for run in line],
                [run["ms_per_request"] for run in line],
                style.dash,
                color=style.colour,
                marker=style.marker,
                label=label,
            )
        label_axes(axes, f"requests ({preset})", "CPU ms per request")
        scale_x_log(axes)
        axes.set_ylim(bottom=0.0)
    add_legend(figure, panels[0])
    write_png(out, figure)
