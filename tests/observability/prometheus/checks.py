"""Checks of a Prometheus that has scraped a system for some seconds."""

from collections.abc import Iterator
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from observability.metrics.catalogue import CATALOGUE
from observability.metrics.metric import Metric
from tests.observability.prometheus.driver import Prometheus
from tests.observability.prometheus.queries import (
    Query,
    alert_queries,
    dashboards,
    panel_queries,
    record_queries,
)

ALL = {metric for metrics in CATALOGUE.values() for metric in metrics}
WINDOWS = ("5s", "20s")  # of $__rate_interval and $__range


def every_query() -> list[Query]:
    return [*panel_queries(), *record_queries(), *alert_queries()]


def without_data(prometheus: Prometheus, queries: list[Query]) -> list[str]:
    """The places of queries that have returned no number since the start."""
    return [each.where for each in queries if not prometheus.samples(each.shown(*WINDOWS))]


def mistyped(prometheus: Prometheus, metrics: set[Metric]) -> dict[str, str]:
    """Families that are missing or have another type. In OpenMetrics a counter's family has no
    `_total`."""
    types = prometheus.types()
    found = {}
    for metric in metrics:
        seen = types.get(metric.family) or types.get(metric.family.removesuffix("_total"))
        if seen != metric.kind.value:
            found[metric.family] = seen or "missing"
    return found


def failing_rules(prometheus: Prometheus) -> list[tuple[str, str]]:
    """Rules that cannot be evaluated, with their errors."""
    reported: list[dict[str, Any]] = prometheus.get("rules")["groups"]
    rules = [rule for group in reported for rule in group["rules"]]
    assert rules
    return [(rule["name"], rule["lastError"]) for rule in rules if rule["health"] != "ok"]


def variables_without_values(prometheus: Prometheus) -> list[str]:
    """Variables without a result of the query `label_values(metric, label)`."""
    empty = []
    for board in dashboards().values():
        for choice in board["templating"]["list"]:
            if choice["type"] == "query":
                metric, label = choice["query"][len("label_values(") : -1].split(", ")
                if not prometheus.get(f"label/{label}/values", **{"match[]": metric}):
                    empty.append(choice["name"])
    return empty


def label_samples(exposition: str) -> Iterator[tuple[Metric, str, str]]:
    """Metric, label and value of each label of each catalogued sample."""
    by_family = {metric.family.removesuffix("_total"): metric for metric in ALL}
    for family in text_string_to_metric_families(exposition):
        if metric := by_family.get(family.name):
            for sample in family.samples:
                for label, value in sample.labels.items():
                    if label != "le":
                        yield metric, label, value


def uncounted(exposition: str) -> set[Metric]:
    """Metrics without a sample, or, except for gauges, with only samples of 0 and NaN."""
    counted = set()
    by_family = {metric.family.removesuffix("_total"): metric for metric in ALL}
    for family in text_string_to_metric_families(exposition):
        metric = by_family.get(family.name)
        values = [sample.value for sample in family.samples]
        if metric and any(value == value and (value or family.type == "gauge") for value in values):
            counted.add(metric)
    return ALL - counted
