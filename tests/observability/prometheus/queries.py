"""All queries of the committed dashboards and rules."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from observability.grafana import build as grafana
from observability.metrics.catalogue import CATALOGUE
from observability.metrics.metric import Kind, Metric
from observability.prometheus import build as prometheus
from observability.prometheus.alerts import ALERTS

BY_FAMILY = {metric.family: metric for metrics in CATALOGUE.values() for metric in metrics}
PARTS = {Kind.COUNTER: ("",), Kind.GAUGE: ("",), Kind.HISTOGRAM: ("_bucket", "_sum", "_count")}
BY_SAMPLE = {
    family + part: metric for family, metric in BY_FAMILY.items() for part in PARTS[metric.kind]
}
NAMED = re.compile(r"\bforetoken[_:][a-zA-Z0-9_:]+")
SELECTED = re.compile(r"\b(foretoken[_:][a-zA-Z0-9_:]+)\{([^}]*)\}")
MATCHER = re.compile(r'(\w+)(=~|!~|!=|=)"([^"]*)"')
VARIABLE = re.compile(r"\$\w+|\$\{\w+\}")


@dataclass(frozen=True)
class Query:
    """A query and its place in a dashboard or rule file."""

    where: str
    expr: str

    def shown(self, rate_window: str, whole: str) -> str:
        """The query with all values of all variables, over these windows."""
        chosen = {"$__rate_interval": rate_window, "$__range": whole}
        return VARIABLE.sub(lambda found: chosen.get(found[0], ".*"), self.expr)

    def metrics(self) -> set[Metric]:
        """The metrics in the query and in the recorded series that it uses. Raises KeyError for a
        name that neither the catalogue nor the rules have."""
        found: set[Metric] = set()
        for name in NAMED.findall(self.expr):
            if name in RECORDED:
                found |= Query(name, RECORDED[name]).metrics()
            else:
                found.add(BY_SAMPLE[name])
        return found

    def filters(self) -> Iterator[tuple[Metric, str, str]]:
        """Metric, label and value of each label filter, without variables."""
        for name, matchers in SELECTED.findall(self.expr):
            for label, operator, value in MATCHER.findall(matchers):
                if name not in RECORDED and not VARIABLE.search(value):
                    for each in value.split("|") if "~" in operator else (value,):
                        yield BY_SAMPLE[name], label, each


def dashboards() -> dict[str, dict[str, Any]]:
    """The committed dashboards by file name."""
    return {path.name: json.loads(path.read_text()) for path in grafana.FOLDER.glob("*.json")}


def groups(name: str) -> list[dict[str, Any]]:
    """The groups of a committed rule file."""
    read: list[dict[str, Any]] = yaml.safe_load((prometheus.FOLDER / name).read_text())["groups"]
    return read


def rules(name: str) -> list[dict[str, Any]]:
    return [rule for group in groups(name) for rule in group["rules"]]


RECORDED: dict[str, str] = {rule["record"]: rule["expr"] for rule in rules("rules.yml")}


def panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def panel_queries() -> Iterator[Query]:
    for name, board in sorted(dashboards().items()):
        for panel in panels(board):
            for target in panel["targets"]:
                yield Query(f"{name}: {panel['title']}: {target['refId']}", target["expr"])


def record_queries() -> Iterator[Query]:
    for rule in rules("rules.yml"):
        yield Query(f"rules.yml: {rule['record']}", rule["expr"])


def alert_queries() -> Iterator[Query]:
    """The values of alerts without their limits, which return data while the alert is silent."""
    for alert in ALERTS:
        for condition in alert.conditions:
            yield Query(f"alerts.yml: {alert.name}", condition.value)
