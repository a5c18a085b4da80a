"""What the estimator counts."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from services.costs import CostModel, Direction
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
        self.batches = Counter(
            "foretoken_estimator_batches", "Batch timings seen, by whether they could be used",
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
            "foretoken_estimator_relative_error",
            "Relative error of the newest model's steps, each told before it was learnt from; "
            "while there were too few of those, of its fit",
            ["quantile"], registry=registry,
        )  # fmt: skip
        self._quantize_token_s = Gauge(
            "foretoken_estimator_quantize_token_seconds",
            "Seconds of the device's own of a token of KV to host memory and back, by the newest "
            "model: gathering, quantizing where it rests as INT8, and back",
            registry=registry,
        )
        self._error_steps = Gauge(
            "foretoken_estimator_error_steps",
            "Steps behind foretoken_estimator_relative_error; 0: it is of the fit",
            registry=registry,
        )
        self._batch_error = Gauge(
            "foretoken_estimator_batch_relative_error",
            "Relative error of whole batches' times, told by their neighbours before they were "
            "learnt from, at the worker of the newest model",
            ["quantile"], registry=registry,
        )  # fmt: skip
        self._swap_token_s = Gauge(
            "foretoken_estimator_swap_token_seconds",
            "Seconds a token of KV takes to host memory and back, by the newest model",
            ["direction"], registry=registry,
        )  # fmt: skip

    def observed(self, timings: int, swaps: int, batches: int, seen: Observed) -> None:
        """Count what came, and how much of it was of use."""
        self.samples.labels("yes").inc(timings - seen.dropped)
        self.samples.labels("no").inc(seen.dropped)
        self.swaps.labels("yes").inc(seen.swaps_kept)
        self.swaps.labels("no").inc(swaps - seen.swaps_kept)
        self.batches.labels("yes").inc(seen.batches_kept)
        self.batches.labels("no").inc(batches - seen.batches_kept)

    def renewed(self, model: CostModel, refitted: bool) -> None:
        """A newer model, fitted to its steps anew, or with other prices or neighbours."""
        self.refits.inc(refitted)
        self._swap_token_s.labels(Direction.OFFLOAD.value).set(model.offload_token_s)
        self._swap_token_s.labels(Direction.UPLOAD.value).set(model.upload_token_s)
        self._quantize_token_s.set(model.quantize_token_s)
        self._error.labels("0.5").set(model.error_p50)
        self._error.labels("0.9").set(model.error_p90)
        self._error_steps.set(model.error_steps)

    def judged(self, batch_error: tuple[float, float] | None) -> None:
        """How far off whole batches were, where enough were told."""
        if batch_error:
            self._batch_error.labels("0.5").set(batch_error[0])
            self._batch_error.labels("0.9").set(batch_error[1])
