"""Building blocks of dashboards: panels of four kinds, and their queries.

Every panel has a unit, a description and thresholds. Queries are filtered by the dashboard's
variables.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from grafana_foundation_sdk.builders import bargauge, common, heatmap, prometheus, stat, timeseries
from grafana_foundation_sdk.builders.dashboard import ThresholdsConfig
from grafana_foundation_sdk.models import units
from grafana_foundation_sdk.models.common import (
    BigValueColorMode,
    BigValueGraphMode,
    BigValueTextMode,
    GraphThresholdsStyleMode,
    LegendDisplayMode,
    LegendPlacement,
    SortOrder,
    StackingMode,
    TooltipDisplayMode,
    VizOrientation,
)
from grafana_foundation_sdk.models.dashboard import DataSourceRef, Threshold
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from observability.prometheus.promql import Queries

CHOSEN = {"model_name": "$model", "class": "$class", "worker": "$worker"}
Q = Queries("$__rate_interval", CHOSEN)
WHOLE = "$__range"  # the time range of the dashboard
SOURCE = DataSourceRef(type_val="prometheus", uid="${source}")

SECONDS, SHARE, COUNT = units.Seconds, units.PercentUnit, units.Short
REQUESTS_S, EVENTS_S, BYTES_S = units.RequestsPerSecond, units.CountsPerSecond, "binBps"
TOKENS, TOKENS_S = "suffix: tok", "suffix: tok/s"

WIDTH = 24  # of the grid
HEIGHT = 8


@dataclass(frozen=True, slots=True)
class Limits:
    """Colours by value, the first from the bottom up. `judges`: the limits separate good from bad
    and are drawn as lines."""

    steps: tuple[tuple[float | None, str], ...]
    judges: bool = True


def up_to(good: float, bearable: float) -> Limits:
    """Good below the first, bad from the second on."""
    return Limits(((None, "green"), (good, "yellow"), (bearable, "red")))


def at_least(good: float, bearable: float) -> Limits:
    """Good from the first on, bad below the second."""
    return Limits(((None, "red"), (bearable, "yellow"), (good, "green")))


# Activity is neither good nor bad.
ACTIVITY = Limits(((None, "text"), (0.001, "green")), judges=False)
NEVER = Limits(((None, "green"), (0.001, "red")), judges=False)  # any occurrence is bad
SELDOM = up_to(0.001, 1)  # occasional occurrences are harmless


@dataclass(frozen=True, slots=True)
class Line:
    """A query, and the name of its series: text with {{label}}."""

    legend: str
    expr: str


Panel = timeseries.Panel | stat.Panel | bargauge.Panel | heatmap.Panel
_PanelT = TypeVar("_PanelT", timeseries.Panel, stat.Panel, bargauge.Panel, heatmap.Panel)


def plot(
    title: str,
    description: str,
    unit: str,
    *lines: Line,
    limits: Limits = ACTIVITY,
    stacked: bool = False,
    width: int = 8,
    top: float | None = None,
) -> Panel:
    """Lines over time; `top` is the upper end of the axis, if set."""
    drawn = GraphThresholdsStyleMode.DASHED if limits.judges else GraphThresholdsStyleMode.OFF
    stacking = StackingMode.NORMAL if stacked else StackingMode.NONE
    panel = _styled(timeseries.Panel(), title, description, unit, limits, width)
    panel.legend(
        common.VizLegendOptions()
        .display_mode(LegendDisplayMode.LIST)
        .placement(LegendPlacement.BOTTOM)
        .show_legend(True)
        .calcs([])
    )
    panel.tooltip(
        common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI).sort(SortOrder.DESCENDING)
    )
    panel.thresholds_style(common.GraphThresholdsStyleConfig().mode(drawn))
    panel.stacking(common.StackingConfig().mode(stacking).group("A"))
    panel.line_width(1).fill_opacity(40 if stacked else 8).axis_soft_min(0)
    if top is not None:
        panel.max(top)
    return _with_queries(panel, lines)


def now(
    title: str,
    description: str,
    unit: str,
    line: Line,
    limits: Limits = ACTIVITY,
    width: int = 4,
    named: bool = False,
    whole: bool = False,
) -> Panel:
    """The last value, large, above its history; `named`: the series' name instead of the value;
    `whole`: one value over the whole time range."""
    panel = _styled(stat.Panel(), title, description, unit, limits, width, height=4)
    panel.graph_mode(BigValueGraphMode.NONE if named or whole else BigValueGraphMode.AREA)
    panel.color_mode(BigValueColorMode.VALUE)
    panel.text_mode(BigValueTextMode.NAME if named else BigValueTextMode.AUTO)
    panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    return _with_queries(panel, [line], instant=whole)


def bars(
    title: str, description: str, unit: str, *lines: Line, limits: Limits = ACTIVITY, width: int = 8
) -> Panel:
    """One bar per series, over the whole time range."""
    panel = _styled(bargauge.Panel(), title, description, unit, limits, width)
    panel.orientation(VizOrientation.HORIZONTAL)
    panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    return _with_queries(panel, lines, instant=True)


def heat(
    title: str, description: str, unit: str, expr: str, limits: Limits = ACTIVITY, width: int = 8
) -> Panel:
    """The distribution of a histogram's values over time."""
    panel = _styled(heatmap.Panel(), title, description, unit, limits, width)
    panel.y_axis(heatmap.YAxisConfig().unit(unit))
    panel.color(heatmap.HeatmapColorOptions().scheme("Oranges").steps(64))
    panel.tooltip(heatmap.HeatmapTooltip().mode(TooltipDisplayMode.SINGLE)).show_legend()
    query = prometheus.Dataquery().expr(expr).legend_format("{{le}}").ref_id("A").range()
    return panel.with_target(query.format(PromQueryFormat.HEATMAP))


def _styled(
    panel: _PanelT,
    title: str,
    description: str,
    unit: str,
    limits: Limits,
    width: int,
    height: int = HEIGHT,
) -> _PanelT:
    steps = [Threshold(value=value, color=color) for value, color in limits.steps]
    panel.title(title).description(description).unit(unit)
    panel.thresholds(ThresholdsConfig().steps(steps))
    panel.datasource(SOURCE).span(width).height(height)
    return panel


def _with_queries(panel: _PanelT, lines: Sequence[Line], instant: bool = False) -> _PanelT:
    for number, line in enumerate(lines):
        query = prometheus.Dataquery().expr(line.expr).legend_format(line.legend)
        query.ref_id(chr(ord("A") + number))
        panel.with_target(query.instant() if instant else query.range())
    return panel
