"""An exposition in which every catalogued metric changes all the time."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from observability.metrics.catalogue import CATALOGUE
from observability.metrics.metric import PREFIX, Kind, Metric
from observability.prometheus.promql import labels_of
from tests.observability.prometheus.emitted import values

TICK_S = 0.2
ALL = [metric for metrics in CATALOGUE.values() for metric in metrics]


@contextmanager
def exposing() -> Iterator[str]:
    """The address (host:port) of a server with metrics that change until the end of the block."""
    registry = CollectorRegistry()
    counting = [_counting(metric, registry) for metric in ALL]
    server, serving = start_http_server(0, "127.0.0.1", registry)
    over = threading.Event()

    def count() -> None:
        while not over.wait(TICK_S):
            for children in counting:
                for child in children:
                    _tick(child)

    counter = threading.Thread(target=count)
    counter.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        over.set()
        counter.join()
        server.shutdown()
        server.server_close()
        serving.join()


Child = Counter | Gauge | Histogram


def _counting(metric: Metric, registry: CollectorRegistry) -> Sequence[Child]:
    """The children of a metric's instrument, one per combination of label values."""
    name, labels = PREFIX + metric.name, labels_of(metric)
    instrument: Child
    match metric.kind:
        case Kind.COUNTER:
            instrument = Counter(name, metric.help, labels, registry=registry)
        case Kind.GAUGE:
            instrument = Gauge(name, metric.help, labels, registry=registry)
        case Kind.HISTOGRAM:
            bounds = metric.buckets
            instrument = Histogram(name, metric.help, labels, registry=registry, buckets=bounds)
    if not labels:
        return [instrument]
    emitted = values()
    values_of_each = (sorted(emitted[metric, label]) for label in labels)
    return [instrument.labels(*each) for each in product(*values_of_each)]


def _tick(child: Child) -> None:
    if isinstance(child, Counter):
        child.inc(0.01)
    elif isinstance(child, Gauge):
        child.set(1)
    else:
        child.observe(0.01)
