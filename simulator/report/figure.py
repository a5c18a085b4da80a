"""The style of all plots, and their output as PNG files and as SVG for a page."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from io import StringIO
from itertools import cycle, product
from math import inf
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from simulator.rows import writing

# Okabe and Ito's colours, which colour-blind readers distinguish, without the two that vanish on a
# light or a dark page.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DASHES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D")
MUTED = "#8a8d93"  # readable on light and dark
WIDTH_IN = 11.0
DPI = 120
MANY = 300  # ratio of the ends of a logarithmic axis from which only powers of ten have ticks
UNDATED = {"Date": None, "Creator": None, "Format": None, "Type": None}


@dataclass(frozen=True, slots=True)
class LineStyle:
    colour: str
    dash: str
    marker: str


@dataclass(frozen=True)
class Picture:
    """A figure with the name of its file, and its title and caption on a page."""

    name: str
    title: str
    caption: str
    figure: Figure


def new_figure(height_in: float) -> Figure:
    return Figure(figsize=(WIDTH_IN, height_in), layout="constrained")


def line_styles(names: Iterable[str]) -> dict[str, LineStyle]:
    """A style for each name, in order. The first lines differ by colour, further ones by their
    dashes or markers too."""
    looks = cycle(product(zip(DASHES, MARKERS, strict=True), COLOURS))
    return {
        name: LineStyle(colour, dash, marker)
        for name, ((dash, marker), colour) in zip(dict.fromkeys(names), looks, strict=False)
    }


def label_axes(axes: Axes, x_label: str, y_label: str) -> None:
    """Labels both axes, and adds a grid behind the data."""
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(color=MUTED, alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def scale_x_log(axes: Axes) -> None:
    """A logarithmic scale with plain numbers, if the positive data span a decade."""
    low, high = axes.dataLim.minposx, axes.dataLim.xmax
    if 10 * low <= high < inf:
        axes.set_xscale("log")
        _label_log(axes.xaxis, high / low)


def scale_y_log(axes: Axes) -> None:
    """The same for the other axis."""
    low, high = axes.dataLim.minposy, axes.dataLim.ymax
    if 10 * low <= high < inf:
        axes.set_yscale("log")
        _label_log(axes.yaxis, high / low)


def _label_log(axis: Axis, ratio: float) -> None:
    axis.set_major_locator(LogLocator(subs=(1.0,) if ratio > MANY else (1.0, 2.0, 5.0)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter("{x:g}")


def add_legend(figure: Figure, of: Axes) -> None:
    """One legend above all axes, with the labels of one of them."""
    handles, labels = of.get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside upper left", ncols=min(len(labels), 6), frameon=False
    )


def write_png(path: Path, figure: Figure) -> None:
    """Writes the figure as PNG. Raises ValueError if the file cannot be written."""
    with writing(path):
        figure.savefig(path, dpi=DPI, format="png")


def draw_svg(figure: Figure) -> str:
    """The figure as an SVG element without references. It is transparent, and its text and axes
    have the colour of the text around it."""
    # Element ids are hashes with this salt, else with a random one.
    with rc_context({"svg.hashsalt": "foretoken", "svg.fonttype": "path"}):
        out = StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata=UNDATED)
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'<svg [^>]*?(viewBox="[^"]*")[^>]*>', r"<svg \1>", svg, count=1)
    # Fills that are black have no attribute and inherit; the style sheet sets them.
    return svg.replace("stroke: #000000", "stroke: currentColor").replace("xlink:href", "href")


def thinned(count: int, most: int) -> Sequence[int]:
    """Up to `most` places among `count`, evenly spread, the first and the last included."""
    if count <= most:
        return range(count)
    return [at * (count - 1) // (most - 1) for at in range(most)]
