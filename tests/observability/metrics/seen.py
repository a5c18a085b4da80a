"""What a scrape of a registry says, beside what the catalogue says it should."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, generate_latest

from observability.metrics.metric import Kind, Metric


def unseen(registry: CollectorRegistry, metrics: Iterable[Metric]) -> list[str]:
    """Families of which there is no type, another type, or no sample."""
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
    """Families that are not catalogued, without those that the library adds."""
    lines = generate_latest(registry).decode().splitlines()
    reported = {line.split()[2] for line in lines if line.startswith("# TYPE ")}
    known = {metric.family for metric in metrics}
    return {name for name in reported - known if not name.endswith("_created")}
