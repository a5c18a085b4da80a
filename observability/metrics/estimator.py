"""Metrics of the estimator: timings received and the accuracy of its cost models."""

from observability.metrics.metric import LATENCY_S, counter, gauge, histogram

SAMPLES = counter(
    "estimator_samples", "Step timings received, by whether they were usable.", "used"
)
SWAPS = counter("estimator_swaps", "Swap timings received, by whether they were usable.", "used")
BATCHES = counter(
    "estimator_batches", "Batch timings received, by whether they were usable.", "used"
)
REFITS = counter("estimator_refits", "Cost models fitted.")
OBSERVE = histogram(
    "estimator_observe_seconds",
    "Time to process one Observe call, including a fit.",
    buckets=LATENCY_S,
)
WATCHERS = gauge("estimator_watchers", "Open WatchCostModel streams.")
ERROR = gauge(
    "estimator_relative_error",
    "Relative error of step estimates made before learning from the step, by worker; the error of "
    "the fit while there are too few steps.",
    "worker", "quantile",
)  # fmt: skip
ERROR_STEPS = gauge(
    "estimator_error_steps",
    "Steps in foretoken_estimator_relative_error; 0 means it is the error of the fit.",
    "worker",
)
BATCH_ERROR = gauge(
    "estimator_batch_relative_error",
    "Relative error of batch time estimates made by nearest neighbours before learning from the "
    "batch, by worker.",
    "worker", "quantile",
)  # fmt: skip
SWAP_TOKEN = gauge(
    "estimator_swap_token_seconds",
    "Transfer time per KV token between device and host memory, by worker and direction.",
    "worker", "direction",
)  # fmt: skip
QUANTIZE_TOKEN = gauge(
    "estimator_quantize_token_seconds",
    "Device time per KV token for gathering and quantizing, both directions of a swap together, by "
    "worker.",
    "worker",
)

ALL = (
    SAMPLES, SWAPS, BATCHES, REFITS, OBSERVE, WATCHERS, ERROR, ERROR_STEPS, BATCH_ERROR, SWAP_TOKEN,
    QUANTIZE_TOKEN,
)  # fmt: skip
