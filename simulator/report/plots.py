"""Plots of runs: distributions of latency, and figures against a swept key."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from services.forecast import Floats
from simulator.engine.records import Records
from simulator.report.summary import Summary

SIZE_IN = (11, 7)
FIGURES = (
    ("token_latency_mean_s", "latency per token, mean, s"),
    ("token_latency_p99_s", "latency per token, p99, s"),
    ("ttft_p99_s", "TTFT, p99, s"),
    ("goodput", "goodput"),
)


def plot_distributions(path: Path, runs: Mapping[str, Records]) -> None:
    """Writes the cumulative share of finished requests by TTFT, latency per token, longest gap and
    end-to-end time, a line per run. Raises ValueError if the file cannot be written."""
    figure = Figure(figsize=SIZE_IN, layout="constrained")
    axes = figure.subplots(2, 2).flat
    columns: tuple[tuple[str, str], ...] = (
        ("ttft_s", "TTFT, s"),
        ("normalized_s", "latency per token, s"),
        ("longest_gap_s", "longest gap, s"),
        ("e2e_s", "end to end, s"),
    )
    for axis, (column, label) in zip(axes, columns, strict=True):
        for name, records in runs.items():
            _plot_cumulative(axis, getattr(records, column)[records.finished], name)
        axis.set_xlabel(label)
        axis.set_xscale("log")
        axis.grid(alpha=0.3)
    figure.axes[0].legend(fontsize="small")
    _save(figure, path)


def plot_sweep(path: Path, key: str, rows: Sequence[tuple[Mapping[str, float], Summary]]) -> None:
    """Writes the main figures against a swept key, a line per preset. Raises ValueError if the file
    cannot be written."""
    figure = Figure(figsize=SIZE_IN, layout="constrained")
    for axis, (column, label) in zip(figure.subplots(2, 2).flat, FIGURES, strict=True):
        for preset in dict.fromkeys(summary.preset for _, summary in rows):
            points = sorted((k[key], getattr(s, column)) for k, s in rows if s.preset == preset)
            axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=preset)
        axis.set_xlabel(key)
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
        if column.endswith("_s"):
            axis.set_yscale("log")
    figure.axes[0].legend(fontsize="small")
    _save(figure, path)


def _plot_cumulative(axis: Axes, values: Floats, label: str) -> None:
    axis.plot(np.sort(values), (np.arange(len(values)) + 1) / max(1, len(values)), label=label)
    axis.set_ylim(0, 1.02)


def _save(figure: Figure, path: Path) -> None:
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot write {path}: {error}") from None
