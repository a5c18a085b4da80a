"""Calibration of length forecasts: their figures and their plot."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from services.forecast import Floats
from simulator.engine.observations import ForecastRecords
from simulator.report.figure import (
    COLOURS,
    MUTED,
    label_axes,
    new_figure,
    scale_x_log,
    scale_y_log,
    thinned,
)

BINS = 10
MOST_POINTS = 400  # of a scatter plot
PANEL_IN = 2.8


@dataclass(frozen=True)
class Calibration:
    """Forecasts at arrival against true lengths, in tokens.

    `pit` is the share of lengths in each tenth of their forecast distribution, 0.1 everywhere if
    forecasts are calibrated. A forecast has at most 64 points, so a length takes the range of
    probabilities of its point in equal parts (Czado, Gneiting and Held, Biometrics 2009, §2.1).
    `coverage` is the share of lengths in the central 90 % interval, ends included.
    """

    forecasts: int
    pit: Floats
    coverage: float
    forecast_mean: float
    true_mean: float
    absolute_error: float


def measure_calibration(records: ForecastRecords) -> Calibration | None:
    """The calibration of all requests with a forecast; None if there is none. O(requests)."""
    made = np.isfinite(records.mean)
    if not made.any():
        return None
    lengths, mean = records.lengths[made], records.mean[made]
    inside = (records.low[made] <= lengths) & (lengths <= records.high[made])
    return Calibration(
        int(made.sum()),
        _pit(records.below[made], records.up_to[made]),
        float(inside.mean()),
        float(mean.mean()),
        float(lengths.mean()),
        float(np.abs(mean - lengths).mean()),
    )


def _pit(below: Floats, up_to: Floats) -> Floats:
    edges = np.linspace(0, 1, BINS + 1)[1:, None]
    width = up_to - below
    part = np.clip((edges - below) / np.where(width > 0, width, 1), 0, 1)
    reached = np.where(width > 0, part, edges >= up_to).mean(axis=1)
    return np.diff(reached, prepend=0.0)


def plot_calibration(runs: Mapping[str, ForecastRecords]) -> Figure:
    """A row per run: the histogram of lengths within their forecasts, and expected against true
    lengths."""
    figure = new_figure(0.4 + PANEL_IN * len(runs))
    grid = figure.subplots(len(runs), 2, squeeze=False)
    for (histogram, scatter), (name, records) in zip(grid, runs.items(), strict=True):
        calibration = measure_calibration(records)
        histogram.set_title(name, loc="left", fontsize="medium")
        label_axes(
            histogram, "probability that the forecast gave to shorter answers", "share of answers"
        )
        label_axes(scatter, "true length, tokens", "expected, tokens")
        if calibration is None:
            histogram.set_title("no request has a forecast", loc="right", fontsize="small")
            continue
        _plot_histogram(histogram, calibration)
        _plot_scatter(scatter, records, calibration)
    return figure


def _plot_histogram(axis: Axes, calibration: Calibration) -> None:
    edges = np.arange(BINS) / BINS
    axis.bar(edges, calibration.pit, 1 / BINS, align="edge", color=COLOURS[0], alpha=0.8)
    axis.axhline(1 / BINS, color=MUTED, linestyle="--", linewidth=1)
    axis.set_xlim(0, 1)
    axis.set_title(
        f"90 % interval covers {calibration.coverage:.0%}; dashed: calibrated",
        loc="right",
        fontsize="small",
    )


def _plot_scatter(axis: Axes, records: ForecastRecords, calibration: Calibration) -> None:
    made = np.flatnonzero(np.isfinite(records.mean))
    made = made[np.array(thinned(len(made), MOST_POINTS), np.int64)]
    true, expected = records.lengths[made], records.mean[made]
    axis.scatter(true, expected, s=10, color=COLOURS[1], alpha=0.5, linewidths=0)
    ends = [min(true.min(), expected.min()), max(true.max(), expected.max())]
    axis.plot(ends, ends, color=MUTED, linestyle="--", linewidth=1)
    scale_x_log(axis)
    scale_y_log(axis)
    axis.set_title(
        f"means: expected {calibration.forecast_mean:,.0f}, true {calibration.true_mean:,.0f}; "
        f"mean absolute error {calibration.absolute_error:,.0f}; dashed: equal",
        loc="right",
        fontsize="small",
    )
