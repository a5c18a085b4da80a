"""Plots of what happened within runs: memory over time, and a Gantt chart of requests."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from services.scheduler.core.phases import TransitionCause
from simulator.engine.observations import Observations, RunningInterval
from simulator.engine.records import Records
from simulator.report.figure import COLOURS, MUTED, label_axes, new_figure

BLUE, RED, GREEN, PINK, ORANGE, _ = COLOURS
MOST_WORKERS = 2  # panels of a run
HEADROOM = 1.15  # above the highest value
PANEL_IN = 2.6
BAR, WAIT = 3.0, 0.8  # line widths, points


@dataclass(frozen=True)
class ObservedRun:
    """What the plots of a run show; `kv_tokens` are the capacities of its workers."""

    records: Records
    observations: Observations
    kv_tokens: tuple[int, ...]


def plot_memory(runs: Mapping[str, ObservedRun]) -> Figure:
    """KV over time in percent of a worker's capacity: a row per run, a panel per worker (the first
    MOST_WORKERS). A predicted peak above the panel is drawn at its upper edge."""
    columns = min(MOST_WORKERS, max(len(run.kv_tokens) for run in runs.values()))
    figure = new_figure(0.7 + PANEL_IN * len(runs))
    grid = figure.subplots(len(runs), columns, sharex=True, squeeze=False)
    for panels, (name, run) in zip(grid, runs.items(), strict=True):
        for worker, axis in enumerate(panels[: len(run.kv_tokens)]):
            title = name if len(run.kv_tokens) == 1 else f"{name}, worker {worker + 1}"
            _plot_worker(axis, title, run, worker)
        for axis in panels[len(run.kv_tokens) :]:
            axis.set_visible(False)
    for axis in grid[-1]:
        axis.set_xlabel("time, s")
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=len(labels), frameon=False)
    return figure


def _plot_worker(axis: Axes, title: str, run: ObservedRun, worker: int) -> None:
    memory = run.observations.memory
    share = memory.of_worker(worker) * (100 / run.kv_tokens[worker])
    used, running, predicted, true = share
    at_s = memory.at_s
    axis.fill_between(at_s, used, step="post", color=MUTED, alpha=0.25, linewidth=0,
                      label="all KV in use")  # fmt: skip
    axis.step(at_s, running, color=BLUE, where="post", label="KV of running requests")
    top = HEADROOM * max(100.0, *(float(part.max(initial=0.0)) for part in (used, running, true)))
    shown, highest = np.minimum(predicted, top), float(predicted.max(initial=0.0))
    axis.step(at_s, shown, "--", color=RED, where="post", label="predicted peak")
    axis.step(at_s, true, color=GREEN, where="post", label="true peak")
    axis.axhline(100, color=MUTED, linewidth=1, linestyle=":", label="capacity")
    axis.set_ylim(0, top * 1.01)
    label_axes(axis, "", "KV, % of capacity")
    cut = f"; the predicted peak is cut, its highest is {highest:,.0f} %" if highest > top else ""
    axis.set_title(title + cut, loc="left", fontsize="medium")


def plot_gantt(runs: Mapping[str, ObservedRun]) -> Figure:
    """When each observed request waited and ran, a panel per run, with equal time axes."""
    figure = new_figure(0.7 + 1.3 * PANEL_IN * len(runs))
    axes = figure.subplots(len(runs), 1, sharex=True, squeeze=False)[:, 0]
    for axis, (name, run) in zip(axes, runs.items(), strict=True):
        _plot_requests(axis, run)
        axis.set_title(name, loc="left", fontsize="medium")
    axes[-1].set_xlabel("time, s")
    figure.legend(
        handles=[
            Line2D([], [], color=MUTED, linewidth=WAIT, label="waits"),
            Line2D([], [], color=BLUE, linewidth=BAR, label="runs"),
            *(
                Line2D([], [], color=colour, marker=mark, linestyle="", label=label)
                for mark, colour, label in MARKS.values()
            ),
        ],
        loc="outside upper left",
        ncols=7,
        frameon=False,
    )
    return figure


FIRST, REJECTED = "first", "rejected"
MARKS = {  # marker, colour, label
    FIRST: ("|", ORANGE, "first token"),
    TransitionCause.PAUSED: ("o", PINK, "paused"),
    TransitionCause.EVICTED: ("x", RED, "evicted"),
    REJECTED: ("D", MUTED, "rejected"),
}


def _plot_requests(axis: Axes, run: ObservedRun) -> None:
    records, timelines = run.records, run.observations.timelines
    rows = np.array(timelines.rows, np.int64)
    intervals = timelines.intervals
    started = rows[np.isfinite(records.first_s[rows])]
    axis.hlines(
        started,
        records.arrival_s[started],
        records.last_s[started],
        color=MUTED,
        linewidth=WAIT,
    )
    bars = [[(each.start_s, each.row), (each.end_s, each.row)] for each in intervals]
    axis.add_collection(LineCollection(bars, colors=BLUE, linewidths=BAR))
    refused = rows[records.rejected[rows]]
    _mark(axis, FIRST, records.first_s[started].tolist(), started.tolist())
    _mark(axis, REJECTED, records.arrival_s[refused].tolist(), refused.tolist())
    for cause in (TransitionCause.PAUSED, TransitionCause.EVICTED):
        stops = [each for each in intervals if each.ended is cause]
        _mark(axis, cause, *_ends(stops))
    label_axes(axis, "", "request")
    axis.set_ylim(rows[-1] + 1, rows[0] - 1)
    axis.margins(x=0.01)
    axis.autoscale_view(scaley=False)


def _ends(intervals: list[RunningInterval]) -> tuple[list[float], list[int]]:
    return [each.end_s for each in intervals], [each.row for each in intervals]


def _mark(axis: Axes, what: str, at_s: Sequence[float], rows: Sequence[int]) -> None:
    marker, colour, _ = MARKS[what]
    axis.plot(at_s, rows, linestyle="", marker=marker, color=colour, markersize=4)
