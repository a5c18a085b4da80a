"""Compares the families of a registry with the catalogue."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, generate_latest

from observability.metrics.metric import Kind, Metric


def unseen(registry: CollectorRegistry, metrics: Iterable[Metric]) -> list[str]:
    """Catalogued families without a sample, or with a missing or different type."""
    lines = generate_latest(registry).decode().splitlines()
    types = {line for line in lines if line.startswith("# TYPE ")}
    sampled = {line.partition("{")[0].partition(" ")[0] for line in lines}
    return [
        metric.family
        for metric in metrics
        if f"# TYPE {metric.family} {metric.kind}" not in types
        or metric.family + ("_count" if metric.kind is Kind.HISTOGRAM else "") not in sampled
    ]


def uncatalogued(registry: CollectorRegistry, metrics: Iterable[Metric]) -> set[str]:
    """Exposed families that are not catalogued, without `_created` series."""
    lines = generate_latest(registry).decode().splitlines()
    exposed = {line.split()[2] for line in lines if line.startswith("# TYPE ")}
    known = {metric.family for metric in metrics}
    return {name for name in exposed - known if not name.endswith("_created")}
