"""What the estimator counts."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from services.core import CostModel
from services.runtime.telemetry import LATENCY_BUCKETS_S


class EstimatorMetrics:
    """Prometheus series of one estimator, in the registry given."""

    def __init__(self, registry: CollectorRegistry):
        self.samples = Counter(
            "foretoken_estimator_samples", "Step timings seen, by whether they could be used",
            ["used"], registry=registry,
        )  # fmt: skip
        self.refits = Counter("foretoken_estimator_refits", "Cost models fitted", registry=registry)
        self.observe_seconds = Histogram(
            "foretoken_estimator_observe_seconds", "Time to take in timings, a fit included",
            buckets=LATENCY_BUCKETS_S, registry=registry,
        )  # fmt: skip
        self.watchers = Gauge(
            "foretoken_estimator_watchers", "Open WatchCostModel streams", registry=registry
        )
        self._error = Gauge(
            "foretoken_estimator_relative_error", "Relative error of the newest fit",
            ["quantile"], registry=registry,
        )  # fmt: skip

    def refitted(self, model: CostModel) -> None:
        self.refits.inc()
        self._error.labels("0.5").set(model.error_p50)
        self._error.labels("0.9").set(model.error_p90)
