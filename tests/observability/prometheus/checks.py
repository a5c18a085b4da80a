"""What holds of a Prometheus that has watched a system for a while."""

from collections.abc import Iterator
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from observability.metrics.catalogue import CATALOGUE
from observability.metrics.metric import Metric
from tests.observability.prometheus.driver import Prometheus
from tests.observability.prometheus.queries import (
    Asked,
    dashboards,
    of_alerts,
    of_panels,
    of_records,
)

ALL = {metric for metrics in CATALOGUE.values() for metric in metrics}
WINDOWS = ("5s", "20s")  # of $__rate_interval and $__range


def every_query() -> list[Asked]:
    return [*of_panels(), *of_records(), *of_alerts()]


def without_data(prometheus: Prometheus, asked: list[Asked]) -> list[str]:
    """Where the queries stand that have given no number since the start."""
    return [each.where for each in asked if not prometheus.samples(each.shown(*WINDOWS))]


def mistyped(prometheus: Prometheus, metrics: set[Metric]) -> dict[str, str]:
    """Families that are not seen, or seen as something else. In OpenMetrics a counter's family has
    no `_total`."""
    types = prometheus.types()
    found = {}
    for metric in metrics:
        seen = types.get(metric.family) or types.get(metric.family.removesuffix("_total"))
        if seen != metric.kind.value:
            found[metric.family] = seen or "not seen"
    return found


def complaints(prometheus: Prometheus) -> list[tuple[str, str]]:
    """Rules that could not be evaluated, each with why."""
    reported: list[dict[str, Any]] = prometheus.get("rules")["groups"]
    rules = [rule for group in reported for rule in group["rules"]]
    assert rules
    return [(rule["name"], rule["lastError"]) for rule in rules if rule["health"] != "ok"]


def choices_without_values(prometheus: Prometheus) -> list[str]:
    """`label_values(metric, label)` of each variable, as Grafana asks for it."""
    empty = []
    for board in dashboards().values():
        for choice in board["templating"]["list"]:
            if choice["type"] == "query":
                metric, label = choice["query"][len("label_values(") : -1].split(", ")
                if not prometheus.get(f"label/{label}/values", **{"match[]": metric}):
                    empty.append(choice["name"])
    return empty


def labelled(exposition: str) -> Iterator[tuple[Metric, str, str]]:
    """Each label of each sample of what is catalogued: metric, label, value."""
    by_family = {metric.family.removesuffix("_total"): metric for metric in ALL}
    for family in text_string_to_metric_families(exposition):
        if metric := by_family.get(family.name):
            for sample in family.samples:
                for label, value in sample.labels.items():
                    if label != "le":
                        yield metric, label, value


def quiet(exposition: str) -> set[Metric]:
    """Metrics that have counted nothing: no sample, or none beside 0 and NaN but for gauges."""
    heard = set()
    by_family = {metric.family.removesuffix("_total"): metric for metric in ALL}
    for family in text_string_to_metric_families(exposition):
        metric = by_family.get(family.name)
        values = [sample.value for sample in family.samples]
        if metric and any(value == value and (value or family.type == "gauge") for value in values):
            heard.add(metric)
    return ALL - heard
