"""Metrics of the estimator."""

from prometheus_client import CollectorRegistry

from observability.metrics import estimator as catalogue
from observability.metrics.instruments import Instruments
from services.costs import CostModel, Direction
from services.estimator.state import Observed
from services.runtime.telemetry.invalid_messages import InvalidMessages

MAX_WORKERS_SHOWN = 64  # workers, eight series each; the least recently updated is evicted
QUANTILES = ("0.5", "0.9")
Errors = tuple[float, float]  # median and 90th percentile


class EstimatorMetrics:
    """Prometheus series of one estimator in the given registry."""

    def __init__(self, registry: CollectorRegistry):
        make = Instruments(registry)
        self.invalid = InvalidMessages(registry, catalogue.INVALID, "GetCostModel", "Observe")
        self.samples = make.counter(catalogue.SAMPLES, "yes", "no")
        self.swaps = make.counter(catalogue.SWAPS, "yes", "no")
        self.batches = make.counter(catalogue.BATCHES, "yes", "no")
        self.refits = make.counter(catalogue.REFITS)
        self.observe_seconds = make.histogram(catalogue.OBSERVE)
        self.watchers = make.gauge(catalogue.WATCHERS)
        self._error = make.gauge(catalogue.ERROR)
        self._error_steps = make.gauge(catalogue.ERROR_STEPS)
        self._batch_error = make.gauge(catalogue.BATCH_ERROR)
        self._swap_token_s = make.gauge(catalogue.SWAP_TOKEN)
        self._quantize_token_s = make.gauge(catalogue.QUANTIZE_TOKEN)
        self._shown: dict[str, None] = {}  # workers, the least recently updated first

    def observed(self, timings: int, swaps: int, batches: int, seen: Observed) -> None:
        """Counts the timings received and how many were usable."""
        self.samples.labels("yes").inc(timings - seen.dropped)
        self.samples.labels("no").inc(seen.dropped)
        self.swaps.labels("yes").inc(seen.swaps_kept)
        self.swaps.labels("no").inc(swaps - seen.swaps_kept)
        self.batches.labels("yes").inc(seen.batches_kept)
        self.batches.labels("no").inc(batches - seen.batches_kept)

    def show(self, worker_id: str, model: CostModel, batch_error: Errors | None) -> None:
        """Exports a worker's newest model and the error of its batch estimates, if known."""
        self._shown.pop(worker_id, None)
        self._shown[worker_id] = None
        if len(self._shown) > MAX_WORKERS_SHOWN:
            self.hide(next(iter(self._shown)))
        for quantile, error in zip(QUANTILES, (model.error_p50, model.error_p90), strict=True):
            self._error.labels(worker_id, quantile).set(error)
        self._error_steps.labels(worker_id).set(model.error_steps)
        for quantile, error in zip(QUANTILES, batch_error or (), strict=False):
            self._batch_error.labels(worker_id, quantile).set(error)
        self._swap_token_s.labels(worker_id, Direction.OFFLOAD.value).set(model.offload_token_s)
        self._swap_token_s.labels(worker_id, Direction.UPLOAD.value).set(model.upload_token_s)
        self._quantize_token_s.labels(worker_id).set(model.quantize_token_s)

    def hide(self, worker_id: str) -> None:
        """Removes the series of a worker that left or was evicted."""
        if worker_id not in self._shown:
            return
        del self._shown[worker_id]
        for gauge in (self._error, self._batch_error):
            for quantile in QUANTILES:
                gauge.remove(worker_id, quantile)
        for direction in Direction:
            self._swap_token_s.remove(worker_id, direction.value)
        self._error_steps.remove(worker_id)
        self._quantize_token_s.remove(worker_id)
