"""Instruments: create the instruments of catalogued metrics in a registry."""

from collections.abc import Iterable
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from observability.metrics.lean import LeanHistogram
from observability.metrics.metric import PREFIX, Kind, Metric
from observability.metrics.reading import Look, Reading

InstrumentT = TypeVar("InstrumentT", Counter, Histogram)


class Instruments:
    """Creates instruments in one registry. Each method raises ValueError if the metric is of
    another kind or already created. Values `known` of a metric's only label start at 0, so that
    a rate includes the first event of each."""

    def __init__(self, registry: CollectorRegistry):
        self._registry = registry

    def counter(self, metric: Metric, *known: str) -> Counter:
        name = _named(metric, Kind.COUNTER)
        counter = Counter(name, metric.help, metric.labels, registry=self._registry)
        return _with_labels(counter, known)

    def gauge(self, metric: Metric) -> Gauge:
        name = _named(metric, Kind.GAUGE)
        return Gauge(name, metric.help, metric.labels, registry=self._registry)

    def histogram(self, metric: Metric, *known: str) -> Histogram:
        name = _named(metric, Kind.HISTOGRAM)
        histogram = Histogram(
            name, metric.help, metric.labels, buckets=metric.buckets, registry=self._registry
        )
        return _with_labels(histogram, known)

    def lean_histogram(self, metric: Metric) -> LeanHistogram:
        """A histogram updated by one thread, many times a second."""
        _named(metric, Kind.HISTOGRAM)
        return LeanHistogram(metric, self._registry)

    def reading(self, metric: Metric, look: Look) -> None:
        """A counter or gauge of existing numbers: `look` is called at each scrape."""
        self._registry.register(Reading(metric, look))


def _with_labels(instrument: InstrumentT, known: Iterable[str]) -> InstrumentT:
    for value in known:
        instrument.labels(value)
    return instrument


def _named(metric: Metric, kind: Kind) -> str:
    if metric.kind is not kind:
        raise ValueError(f"{metric.name} is catalogued as a {metric.kind}, not as a {kind}")
    return PREFIX + metric.name
