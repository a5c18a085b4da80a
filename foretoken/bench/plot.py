"""A benchmark drawn: how TTFT and TPOT are distributed, and how the load went."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from foretoken.bench.measures import timeline
from foretoken.bench.run import Outcome

SIZE_IN = (11, 7)


def draw(path: Path, outcomes: Sequence[Outcome]) -> None:
    """Above, the share of whole answers by TTFT and by TPOT, over all rounds; below, the last
    round: tokens a second, and requests under way. The ending of `path` is the picture's format.

    Raises ValueError where it can't be written."""
    figure = Figure(figsize=SIZE_IN, layout="constrained")
    (ttft, tpot), (made, running) = figure.subplots(2, 2)
    for outcome in outcomes:
        if not outcome.rounds:
            continue
        label = f"{outcome.url} {outcome.model}"
        whole = [s for went in outcome.rounds for s in went.samples if s.whole]
        _shares(ttft, [s.ttft_s for s in whole], label)
        _shares(tpot, [s.tpot_s for s in whole if s.tpot_s is not None], label)
        last = outcome.rounds[-1]
        line = timeline(last.samples, last.lasted_s)
        made.plot(line.at_s, line.tokens_per_s, label=label)
        running.plot(line.at_s, line.running, label=label)
    for axes, title, unit in (
        (ttft, "TTFT", "ms"),
        (tpot, "TPOT", "ms"),
        (made, "output tokens/s", "s"),
        (running, "requests under way", "s"),
    ):
        axes.set_title(title)
        axes.set_xlabel(unit)
        axes.grid(alpha=0.3)
    ttft.legend(fontsize="small")
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot write {path}: {error}") from None


def _shares(axes: Axes, values_s: Sequence[float], label: str) -> None:
    ordered = sorted(value * 1e3 for value in values_s)
    axes.plot(ordered, [(i + 1) / len(ordered) for i in range(len(ordered))], label=label)
    axes.set_ylim(0, 1.02)
    axes.set_xlim(left=0)
