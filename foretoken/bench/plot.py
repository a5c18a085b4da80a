"""Plots a benchmark: distributions of TTFT and TPOT, and the course of the load."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from foretoken.bench.measures import timeline
from foretoken.bench.run import Outcome

SIZE_IN = (11, 7)


def draw(path: Path, outcomes: Sequence[Outcome]) -> None:
    """Writes the figure; the suffix of `path` selects the format.

    Top: cumulative share of answers by TTFT and TPOT over all rounds. Bottom: tokens per second and
    requests in flight of the last round. Raises ValueError if the file cannot be written.
    """
    figure = Figure(figsize=SIZE_IN, layout="constrained")
    (ttft, tpot), (throughput, running) = figure.subplots(2, 2)
    for outcome in outcomes:
        if not outcome.rounds:
            continue
        label = f"{outcome.url} {outcome.model}"
        complete = [s for each in outcome.rounds for s in each.samples if s.complete]
        _plot_cumulative(ttft, [s.ttft_s for s in complete], label)
        _plot_cumulative(tpot, [s.tpot_s for s in complete if s.tpot_s is not None], label)
        last = outcome.rounds[-1]
        line = timeline(last.samples, last.lasted_s)
        throughput.plot(line.at_s, line.tokens_per_s, label=label)
        running.plot(line.at_s, line.running, label=label)
    for axes, title, unit in (
        (ttft, "TTFT", "ms"),
        (tpot, "TPOT", "ms"),
        (throughput, "output tokens/s", "s"),
        (running, "requests in flight", "s"),
    ):
        axes.set_title(title)
        axes.set_xlabel(unit)
        axes.grid(alpha=0.3)
    ttft.legend(fontsize="small")
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot write {path}: {error}") from None


def _plot_cumulative(axes: Axes, values_s: Sequence[float], label: str) -> None:
    ordered = sorted(value * 1e3 for value in values_s)
    axes.plot(ordered, [(i + 1) / len(ordered) for i in range(len(ordered))], label=label)
    axes.set_ylim(0, 1.02)
    axes.set_xlim(left=0)
