"""Plots a report: tau and pinball loss by predictor, and calibration."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lab.evaluation.report import JsonRow, number
from services.predictor.learning.scorecard import SCORE_LEVELS

BARS_WIDTH = 0.8  # of one data set; the distance between two data sets is 1


def plot(path: Path, rows: Sequence[JsonRow]) -> None:
    """Writes the plot; the file suffix selects the format. Raises ValueError if not writable."""
    figure = Figure(figsize=(9, 11), layout="constrained")
    ranks, losses, calibration = figure.subplots(3, 1)
    for axes in (ranks, losses, calibration):  # the default has ten colours, fewer than predictors
        axes.set_prop_cycle(color=colormaps["tab20"](np.arange(20)))
    _bars(ranks, rows, "tau", "Kendall's tau-b (higher is better)")
    _bars(losses, rows, "pinball", "pinball loss, tokens (lower is better)")
    losses.set_yscale("log")
    _calibration(calibration, rows)
    figure.legend(*ranks.get_legend_handles_labels(), loc="outside right upper")
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}") from None


def _names(rows: Sequence[JsonRow], key: str) -> list[str]:
    return [*dict.fromkeys(str(row[key]) for row in rows)]


def _bars(axes: Axes, rows: Sequence[JsonRow], key: str, label: str) -> None:
    """Draws one group of bars per data set. A constant forecast has no tau and no bar."""
    sets, predictors = _names(rows, "data"), _names(rows, "predictor")
    height = {(row["data"], row["predictor"]): number(row, key) for row in rows}
    width = BARS_WIDTH / len(predictors)
    for i, predictor in enumerate(predictors):
        left = np.arange(len(sets)) + (i + 0.5) * width - BARS_WIDTH / 2
        axes.bar(left, [height.get((d, predictor), np.nan) for d in sets], width, label=predictor)
    axes.set_xticks(range(len(sets)), sets, rotation=20 if len(sets) > 3 else 0)
    axes.set_xlim(-0.5, len(sets) - 0.5)
    axes.set_ylabel(label)


def _calibration(axes: Axes, rows: Sequence[JsonRow]) -> None:
    """Draws the share of lengths below each quantile of in-domain rows, or of all rows when there
    are none."""
    rows = [row for row in rows if row["in_domain"]] or rows
    axes.plot([0, 1], [0, 1], color="0.7", linestyle="--")
    for predictor in _names(rows, "predictor"):
        selected = [row for row in rows if row["predictor"] == predictor]
        shares = np.array([row["reached"] for row in selected], np.float64)
        weights = [number(row, "n") for row in selected]
        axes.plot(
            SCORE_LEVELS, np.average(shares, axis=0, weights=weights), marker=".", label=predictor
        )
    axes.set_xlabel("quantile of the forecast")
    axes.set_ylabel("share of lengths up to it")
