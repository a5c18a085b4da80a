"""The batcher's metrics."""

from prometheus_client import CollectorRegistry

from observability.metrics import batcher as catalogue
from observability.metrics.instruments import BoundedLabels, Instruments
from services.runtime.telemetry.invalid_messages import InvalidMessages


class BatcherMetrics:
    """The Prometheus series of one batcher."""

    def __init__(self, registry: CollectorRegistry):
        self.invalid = InvalidMessages(registry, catalogue.INVALID, "Arrange")
        self._round = Instruments(registry).histogram(catalogue.ROUND)
        self._presets = BoundedLabels()  # bounded: schedulers choose their presets' names

    def observe_round(self, preset: str, seconds: float) -> None:
        self._round.labels(self._presets.label(preset)).observe(seconds)
