"""LeanHistogram: a histogram without locks, updated by one thread for every token."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from math import inf

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

from observability.metrics.metric import Metric
from observability.metrics.rows import Head, Key, Row, format_number


class Cells:
    """The buckets of one series. Observations need no lock: only one thread updates them."""

    __slots__ = ("_bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]):
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Counts a value `times` times. O(log buckets)."""
        self.counts[bisect_left(self._bounds, value)] += times
        self.sum += value * times


class LeanHistogram(Collector):
    """Series by label values, each created on first use: the caller bounds their number."""

    def __init__(self, metric: Metric, registry: CollectorRegistry):
        self._metric = metric
        self._cells: dict[tuple[str, ...], Cells] = {}
        self._bound_labels = [format_number(bound) for bound in (*metric.buckets, inf)]
        if not metric.labels:
            self.labels()
        registry.register(self)

    def labels(self, *values: str) -> Cells:
        cells = self._cells.get(values)
        if cells is None:
            if len(values) != len(self._metric.labels):
                raise ValueError(f"{self._metric.name} has labels {self._metric.labels}")
            cells = self._cells[values] = Cells(self._metric.buckets)
        return cells

    def describe(self) -> Iterator[HistogramMetricFamily]:
        metric = self._metric
        yield HistogramMetricFamily(metric.family, metric.help, labels=metric.labels)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        for family in self.describe():
            for values, cells in self._cells.items():
                buckets, total = [], 0
                for bound, count in zip(self._bound_labels, cells.counts, strict=True):
                    total += count
                    buckets.append((bound, float(total)))
                family.add_metric(values, buckets, cells.sum)
            yield family

    # The text of an exposition is made of these instead: see Rows.

    def head(self) -> Head:
        return self._metric.family, "histogram", self._metric.help

    def rows(self) -> Iterable[tuple[Key, Row]]:
        return [(key, (*cells.counts, cells.sum)) for key, cells in self._cells.items()]

    def series(self, key: Key) -> Sequence[tuple[str, Mapping[str, str]]]:
        name, labels = self._metric.family, dict(zip(self._metric.labels, key, strict=True))
        buckets = [(f"{name}_bucket", {**labels, "le": bound}) for bound in self._bound_labels]
        return [*buckets, (f"{name}_count", labels), (f"{name}_sum", labels)]

    def values(self, row: Row) -> Iterable[float]:
        *counts, total = row
        cumulated = list(accumulate(counts))
        return [*cumulated, cumulated[-1], total]
