"""Building blocks of dashboards: panels of four kinds, and their queries.

Every panel has a unit, a description and thresholds. The description is, unless given, the help
text of the metrics that the panel shows. Queries are filtered by the dashboard's variables.
"""

import re
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

from observability.metrics.catalogue import CATALOGUE
from observability.metrics.metric import Metric
from observability.prometheus.promql import Queries

VARIABLES = {"model_name": "$model", "class": "$class", "worker": "$worker"}
Q = Queries("$__rate_interval", VARIABLES)
TIME_RANGE = "$__range"  # the time range of the dashboard
HELP = {metric.family: metric.help for metrics in CATALOGUE.values() for metric in metrics}
SOURCE = DataSourceRef(type_val="prometheus", uid="${source}")

SECONDS, SHARE, COUNT = units.Seconds, units.PercentUnit, units.Short
REQUESTS_S, EVENTS_S, BYTES_S = units.RequestsPerSecond, units.CountsPerSecond, "binBps"
BYTES = units.BytesIEC
TOKENS, TOKENS_S = "suffix: tok", "suffix: tok/s"

HEIGHT = 8


@dataclass(frozen=True, slots=True)
class Limits:
    """Colours, each with the value from which it applies. `drawn`: as dashed lines in a plot."""

    steps: tuple[tuple[float | None, str], ...]
    drawn: bool = True


def up_to(good: float, acceptable: float) -> Limits:
    """Green below `good`, red from `acceptable` on."""
    return Limits(((None, "green"), (good, "yellow"), (acceptable, "red")))


def at_least(good: float, acceptable: float) -> Limits:
    """Green from `good` on, red below `acceptable`."""
    return Limits(((None, "red"), (acceptable, "yellow"), (good, "green")))


# Activity is neither good nor bad.
ACTIVITY = Limits(((None, "text"), (0.001, "green")), drawn=False)
NEVER = Limits(((None, "green"), (0.001, "red")), drawn=False)  # any occurrence is bad
SELDOM = up_to(0.001, 1)  # occasional occurrences are harmless


@dataclass(frozen=True, slots=True)
class Line:
    """A query, and the name of its series: text with {{label}}."""

    legend: str
    expr: str


Panel = timeseries.Panel | stat.Panel | bargauge.Panel | heatmap.Panel
_PanelT = TypeVar("_PanelT", timeseries.Panel, stat.Panel, bargauge.Panel, heatmap.Panel)


def percentiles(*percents: int, of: Metric) -> tuple[Line, ...]:
    """Lines of a histogram's percentiles."""
    return tuple(Line(f"p{percent}", Q.quantile(percent / 100, of)) for percent in percents)


def plot(
    title: str,
    unit: str,
    *lines: Line,
    description: str = "",
    limits: Limits = ACTIVITY,
    stacked: bool = False,
    width: int = 8,
    top: float | None = None,
) -> Panel:
    """Lines over time; `top` is the upper end of the axis, if set."""
    drawn = GraphThresholdsStyleMode.DASHED if limits.drawn else GraphThresholdsStyleMode.OFF
    stacking = StackingMode.NORMAL if stacked else StackingMode.NONE
    panel = _styled(timeseries.Panel(), title, description, unit, lines, limits, width)
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


def last_value(
    title: str,
    unit: str,
    line: Line,
    description: str = "",
    limits: Limits = ACTIVITY,
    named: bool = False,
    whole: bool = False,
) -> Panel:
    """The last value, large, above its history; `named`: the series' name instead of the value;
    `whole`: one value over the whole time range."""
    panel = _styled(stat.Panel(), title, description, unit, [line], limits, width=4, height=4)
    panel.graph_mode(BigValueGraphMode.NONE if named or whole else BigValueGraphMode.AREA)
    panel.color_mode(BigValueColorMode.VALUE)
    panel.text_mode(BigValueTextMode.NAME if named else BigValueTextMode.AUTO)
    panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    return _with_queries(panel, [line], instant=whole)


def bars(title: str, unit: str, *lines: Line, description: str, limits: Limits) -> Panel:
    """One bar per series, over the whole time range."""
    panel = _styled(bargauge.Panel(), title, description, unit, lines, limits)
    panel.orientation(VizOrientation.HORIZONTAL)
    panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    return _with_queries(panel, lines, instant=True)


def heat(title: str, unit: str, metric: Metric, limits: Limits = ACTIVITY, width: int = 8) -> Panel:
    """The distribution of a histogram's values over time."""
    line = Line("{{le}}", Q.buckets(metric))
    panel = _styled(heatmap.Panel(), title, "", unit, [line], limits, width)
    panel.y_axis(heatmap.YAxisConfig().unit(unit))
    panel.color(heatmap.HeatmapColorOptions().scheme("Oranges").steps(64))
    panel.tooltip(heatmap.HeatmapTooltip().mode(TooltipDisplayMode.SINGLE)).show_legend()
    query = prometheus.Dataquery().expr(line.expr).legend_format(line.legend).ref_id("A").range()
    return panel.with_target(query.format(PromQueryFormat.HEATMAP))


def _styled(
    panel: _PanelT,
    title: str,
    description: str,
    unit: str,
    lines: Sequence[Line],
    limits: Limits,
    width: int = 8,
    height: int = HEIGHT,
) -> _PanelT:
    steps = [Threshold(value=value, color=color) for value, color in limits.steps]
    panel.title(title).description(description or _help_of(lines)).unit(unit)
    panel.thresholds(ThresholdsConfig().steps(steps))
    panel.datasource(SOURCE).span(width).height(height)
    return panel


def _with_queries(panel: _PanelT, lines: Sequence[Line], instant: bool = False) -> _PanelT:
    for number, line in enumerate(lines):
        query = prometheus.Dataquery().expr(line.expr).legend_format(line.legend)
        query.ref_id(chr(ord("A") + number))
        panel.with_target(query.instant() if instant else query.range())
    return panel


def _help_of(lines: Sequence[Line]) -> str:
    """The help texts of all metrics in the lines, each once."""
    names = [name for line in lines for name in re.findall(r"\bforetoken_\w+", line.expr)]
    helps = [HELP[name if name in HELP else name.rpartition("_")[0]] for name in names]
    return " ".join(dict.fromkeys(helps))
