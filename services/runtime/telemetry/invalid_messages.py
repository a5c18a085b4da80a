"""Counts the invalid messages that a service received."""

import re

from prometheus_client import CollectorRegistry

from observability.metrics.instruments import BoundedLabels, Instruments
from observability.metrics.metric import Metric

INDEX = re.compile(r"\[[^\]]*\]")  # of a field with several values
WHOLE = "message"  # the field of a message that is wrong as a whole


class InvalidMessages:
    """The counter of one service. `count` is what a Mount calls as `on_invalid`."""

    def __init__(self, registry: CollectorRegistry, metric: Metric, *methods: str):
        """`methods` start at 0. Fields are bounded: callers name some of them."""
        self._counter, self._fields = Instruments(registry).counter(metric), BoundedLabels()
        for method in methods:
            self._counter.labels(method, WHOLE)

    def count(self, method: str, field: str) -> None:
        name = INDEX.sub("", field) or WHOLE
        self._counter.labels(method, self._fields.label(name)).inc()
