"""What the batcher counts."""

from prometheus_client import CollectorRegistry

from observability.metrics import batcher as catalogue
from observability.metrics.instruments import Instruments
from observability.metrics.names import Names


class BatcherMetrics:
    """Prometheus series of one batcher, in the registry given."""

    def __init__(self, registry: CollectorRegistry):
        self._round = Instruments(registry).histogram(catalogue.ROUND)
        self._presets = Names()  # whoever connects names its own

    def arranged(self, preset: str, seconds: float) -> None:
        self._round.labels(self._presets.of(preset)).observe(seconds)
