"""Reading: a metric of numbers that exist anyway, read at each scrape.

It costs nothing in between. The numbers may be changing in another thread, so only single numbers
and sizes are read, and nothing is iterated.
"""

import logging
from collections.abc import Callable, Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from observability.metrics.metric import PREFIX, Kind, Metric

log = logging.getLogger(__name__)

Look = Callable[[], float | Mapping[str, float] | None]
"""The number, or one for each value of the metric's only label; None while there is none."""


class Reading(Collector):
    """One metric, a counter or a gauge. One that cannot be read is omitted from its scrape; all
    others are exported."""

    def __init__(self, metric: Metric, look: Look):
        """Raises ValueError for a histogram, and for a metric with several labels."""
        if metric.kind is Kind.HISTOGRAM or len(metric.labels) > 1:
            raise ValueError(f"{metric.name}: a number, or one a value of one label, can be read")
        self._metric = metric
        self._look = look

    def describe(self) -> Iterable[CounterMetricFamily | GaugeMetricFamily]:
        yield self._family()

    def collect(self) -> Iterable[CounterMetricFamily | GaugeMetricFamily]:
        try:
            read = self._look()
        except Exception:
            log.exception("%s could not be read", self._metric.family)
            return
        family = self._family()
        values = read if isinstance(read, Mapping) else {} if read is None else {"": read}
        for label, value in values.items():
            family.add_metric([label] if self._metric.labels else [], value)
        yield family

    def _family(self) -> CounterMetricFamily | GaugeMetricFamily:
        metric = self._metric
        kind = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
        return kind(PREFIX + metric.name, metric.help, labels=metric.labels)
