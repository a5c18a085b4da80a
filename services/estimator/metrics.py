"""What the estimator counts."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from services.core import CostModel, Direction
from services.estimator.state import Observed
from services.runtime.telemetry import LATENCY_BUCKETS_S


class EstimatorMetrics:
    """Prometheus series of one estimator, in the registry given."""

    def __init__(self, registry: CollectorRegistry):
        self.samples = Counter(
            "foretoken_estimator_samples", "Step timings seen, by whether they could be used",
            ["used"], registry=registry,
        )  # fmt: skip
        self.swaps = Counter(
            "foretoken_estimator_swaps", "Swap timings seen, by whether they could be used",
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

        self._swap_token_s = Gauge(
            "foretoken_estimator_swap_token_seconds",
            "Seconds a token of KV takes to host memory and back, by the newest model",
            ["direction"], registry=registry,
        )  # fmt: skip

    def observed(self, timings: int, swaps: int, seen: Observed) -> None:
        """Count what came, and how much of it was of use."""
        self.samples.labels("yes").inc(timings - seen.dropped)
        self.samples.labels("no").inc(seen.dropped)
        self.swaps.labels("yes").inc(seen.swaps_kept)
        self.swaps.labels("no").inc(swaps - seen.swaps_kept)

    def renewed(self, model: CostModel, refitted: bool) -> None:
        """A newer model, fitted to its steps anew or only priced anew."""
        self.refits.inc(refitted)
        self._swap_token_s.labels(Direction.OFFLOAD.value).set(model.offload_token_s)
        self._swap_token_s.labels(Direction.UPLOAD.value).set(model.upload_token_s)
        self._error.labels("0.5").set(model.error_p50)
        self._error.labels("0.9").set(model.error_p90)
