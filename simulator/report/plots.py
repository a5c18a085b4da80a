"""Plots that compare runs: distributions of latency, and figures against a swept key."""

from collections.abc import Mapping, Sequence
from math import isfinite

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from services.forecast import Floats
from simulator.engine.records import Records
from simulator.report.figure import (
    MUTED,
    add_legend,
    label_axes,
    line_styles,
    new_figure,
    scale_x_log,
    scale_y_log,
    thinned,
)
from simulator.report.summary import P99, Summary

MOST_POINTS = 500  # of a line
WIDE = 8.0  # ratio of the largest to the smallest swept value from which their axis is logarithmic
DISTRIBUTIONS: tuple[tuple[str, str], ...] = (
    ("ttft_s", "TTFT, s"),
    ("normalized_s", "latency per output token, s"),
    ("longest_gap_s", "longest gap between tokens, s"),
    ("e2e_s", "end-to-end latency, s"),
)
# Axis label, and the figures on it with their labels; the second one is dashed.
SWEPT: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    (
        "latency per output token, s",
        (("token_latency_mean_s", "mean"), ("token_latency_p99_s", "p99")),
    ),
    ("TTFT, s", (("ttft_mean_s", "mean"), ("ttft_p99_s", "p99"))),
    ("goodput, share of requests", (("goodput", "goodput"),)),
    (
        "output tokens per second",
        (("output_tokens_per_s", "all"), ("goodput_tokens_per_s", "within the SLA")),
    ),
)
KEY_LABELS = {
    "rate": "rate, requests per second",
    "clients": "clients",
    "workers": "workers",
    "kv_tokens": "KV capacity of a worker, tokens",
    "max_tokens": "max_tokens of a request",
}


def plot_distributions(runs: Mapping[str, Records]) -> Figure:
    """The cumulative share of finished requests by TTFT, latency per token, longest gap and
    end-to-end time, a line per run."""
    figure = new_figure(7.0)
    axes = figure.subplots(2, 2, sharey=True).flat
    for axis, (column, label) in zip(axes, DISTRIBUTIONS, strict=True):
        for name, style in line_styles(runs).items():
            records = runs[name]
            values, shares = cumulative(getattr(records, column)[records.finished])
            axis.plot(values, shares, style.dash, color=style.colour, label=name)
        axis.axhline(P99, color=MUTED, linewidth=0.8, linestyle=":")
        label_axes(axis, label, "")
        axis.set_ylim(0, 1.02)
        scale_x_log(axis)
    for axis in figure.axes[::2]:
        axis.set_ylabel("share of finished requests")
    place = ("axes fraction", "data")
    figure.axes[0].annotate(
        "p99", (0.01, P99), xycoords=place, va="top", color=MUTED, fontsize="small"
    )
    add_legend(figure, figure.axes[0])
    return figure


def plot_sweep(key: str, rows: Sequence[tuple[Mapping[str, float], Summary]]) -> Figure:
    """The main figures against a swept key, a line per preset; p99 beside the mean."""
    figure = new_figure(7.5)
    styles = line_styles(summary.preset for _, summary in rows)
    values = sorted({keys[key] for keys, _ in rows})
    for axis, (label, columns) in zip(figure.subplots(2, 2).flat, SWEPT, strict=True):
        for preset, style in styles.items():
            runs = sorted(
                ((k[key], s) for k, s in rows if s.preset == preset), key=lambda run: run[0]
            )
            for (column, _), dash in zip(columns, ("-", "--"), strict=False):
                axis.plot(
                    [value for value, _ in runs],
                    [getattr(summary, column) for _, summary in runs],
                    dash,
                    color=style.colour,
                    marker=style.marker,
                    markersize=4,
                    label=preset if dash == "-" else None,
                )
        label_axes(axis, KEY_LABELS.get(key, key), label)
        if len(columns) == 2:
            (_, solid), (_, dashed) = columns
            axis.set_title(f"solid: {solid}, dashed: {dashed}", fontsize="small", loc="right")
        _scale_key(axis, values)
        if label.endswith(", s"):
            scale_y_log(axis)
        else:
            axis.set_ylim(bottom=0)
    add_legend(figure, figure.axes[0])
    return figure


def cumulative(values: Floats) -> tuple[Floats, Floats]:
    """Ascending values and the share of values up to each, at most MOST_POINTS of them."""
    at = np.array(thinned(len(values), MOST_POINTS), np.int64)
    return np.sort(values)[at], (at + 1) / max(1, len(values))


def _scale_key(axis: Axes, values: Sequence[float]) -> None:
    """A tick at each swept value; a logarithmic scale if they spread widely."""
    if values[0] > 0 and values[-1] / values[0] >= WIDE and isfinite(values[-1]):
        axis.set_xscale("log")
    axis.set_xticks(values, [f"{value:g}" for value in values])
    axis.set_xticks([], minor=True)
