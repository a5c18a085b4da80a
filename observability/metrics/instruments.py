"""Instruments: create the instruments of catalogued metrics in a registry."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from observability.metrics.lean import LeanHistogram
from observability.metrics.metric import PREFIX, Kind, Metric
from observability.metrics.rows import Head, Key, Row

log = logging.getLogger(__name__)

InstrumentT = TypeVar("InstrumentT", Counter, Histogram)

OTHER = "other"
MAX_LABEL_CHARS = 64

ReadValue = Callable[[], float | Mapping[str, float] | Mapping[tuple[str, ...], float] | None]
"""The number, or one for each value of the metric's only label or for the values of its labels;
None while there is none."""


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

    def reading(self, metric: Metric, read: ReadValue) -> None:
        """A counter or gauge of existing numbers: `read` is called at each scrape."""
        self._registry.register(Reading(metric, read))


class Reading(Collector):
    """One counter or gauge of numbers that exist anyway, read at each scrape. An unreadable one is
    omitted from its scrape.

    The numbers may be changing in another thread, so only single numbers and sizes are read, and
    nothing is iterated.
    """

    def __init__(self, metric: Metric, read: ReadValue):
        """Raises ValueError for a histogram."""
        if metric.kind is Kind.HISTOGRAM:
            raise ValueError(f"{metric.name}: only a counter or gauge can be read")
        self._metric = metric
        self._read = read

    def describe(self) -> Iterable[CounterMetricFamily | GaugeMetricFamily]:
        yield self._family()

    def collect(self) -> Iterable[CounterMetricFamily | GaugeMetricFamily]:
        rows = self.rows()
        if rows is None:
            return
        family = self._family()
        for key, [value] in rows:
            family.add_metric(key, value)
        yield family

    # The text of an exposition is made of these instead: see Rows.

    def head(self) -> Head:
        return self._metric.family, self._metric.kind.value, self._metric.help

    def rows(self) -> list[tuple[Key, Row]] | None:
        try:
            read = self._read()
        except Exception:
            log.exception("metric %s cannot be read and is omitted", self._metric.family)
            return None
        if not isinstance(read, Mapping):
            return [] if read is None else [((), (read,))]
        return [
            (label if isinstance(label, tuple) else (label,), (value,))
            for label, value in read.items()
        ]

    def series(self, key: Key) -> Sequence[tuple[str, Mapping[str, str]]]:
        return [(self._metric.family, dict(zip(self._metric.labels, key, strict=True)))]

    def values(self, row: Row) -> Iterable[float]:
        return row

    def _family(self) -> CounterMetricFamily | GaugeMetricFamily:
        metric = self._metric
        kind = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
        return kind(PREFIX + metric.name, metric.help, labels=metric.labels)


class BoundedLabels:
    """Label values from outside, bounded in number: the first `max_values` keep their names; later
    and longer ones become `other`."""

    def __init__(self, max_values: int = 32):
        self._max_values = max_values
        self._known: set[str] = set()

    def label(self, name: str) -> str:
        if name in self._known:
            return name
        if len(self._known) >= self._max_values or len(name) > MAX_LABEL_CHARS:
            return OTHER
        self._known.add(name)
        return name


def _with_labels(instrument: InstrumentT, known: Iterable[str]) -> InstrumentT:
    for value in known:
        instrument.labels(value)
    return instrument


def _named(metric: Metric, kind: Kind) -> str:
    if metric.kind is not kind:
        raise ValueError(f"{metric.name} is catalogued as a {metric.kind}, not as a {kind}")
    return PREFIX + metric.name
