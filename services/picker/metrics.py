"""The picker's Prometheus metrics."""

from collections import Counter as Tally
from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry

from observability.metrics import picker as catalogue
from observability.metrics.instruments import BoundedLabels, Instruments
from services.picker.core.picking import Cause
from services.picker.core.pool import Placement
from services.picker.core.server_state import Health
from services.runtime.telemetry.invalid_messages import InvalidMessages

COMPLETE, ERROR, BROKEN = "complete", "error", "broken"
READ, FAILED, LATE, OPEN = "read", "failed", "late", "open"
MAX_ENDPOINT_LABELS = 256


class PickerMetrics:
    """The series of one picker; `health` and `in_flight` are read at each scrape."""

    def __init__(
        self,
        registry: CollectorRegistry,
        health: Callable[[], Mapping[str, Health]],
        in_flight: Callable[[], int],
    ):
        make = Instruments(registry)
        self._picks = make.counter(catalogue.PICKS)
        self._endpoints = BoundedLabels(MAX_ENDPOINT_LABELS)
        self._expected = make.histogram(catalogue.FORESEEN)
        self._cached = make.counter(catalogue.CACHED)
        self.refused = make.counter(catalogue.REFUSED, *Cause)
        self.ended = make.counter(catalogue.ENDED, COMPLETE, ERROR, BROKEN)
        self.pick = make.histogram(catalogue.PICK)
        self.ttft = make.histogram(catalogue.TTFT)
        self.tokens = make.counter(catalogue.TOKENS)
        self.scrapes = make.counter(catalogue.SCRAPES, READ, FAILED, LATE)
        self.fallbacks = make.counter(catalogue.FALLBACKS, LATE, FAILED, OPEN)
        self.outcomes_dropped = make.counter(catalogue.OUTCOMES_DROPPED)
        self.invalid = InvalidMessages(registry, catalogue.INVALID, "Process")
        make.reading(catalogue.IN_FLIGHT, in_flight)
        make.reading(catalogue.ENDPOINTS, lambda: _count(health()))

    def record(self, placement: Placement) -> None:
        self._picks.labels(self._endpoints.label(placement.addresses[0])).inc()
        self._expected.observe(placement.expected.ttft_s)
        self._cached.inc(placement.cached_tokens)


def _count(health: Mapping[str, Health]) -> Mapping[str, float]:
    counts = Tally(health.values())
    return {each.value: counts[each] for each in Health}
