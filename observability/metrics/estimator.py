"""Metrics of the estimator: timings received and the accuracy of its cost models."""

from observability.metrics.metric import (
    LATENCY_S,
    counter,
    gauge,
    histogram,
    invalid_messages,
    metrics_in,
)

SAMPLES = counter(
    "estimator_samples", "Received step timings, by whether they were usable.", "used"
)
SWAPS = counter("estimator_swaps", "Received swap timings, by whether they were usable.", "used")
BATCHES = counter(
    "estimator_batches", "Received batch timings, by whether they were usable.", "used"
)
REFITS = counter("estimator_refits", "Fitted cost models.")
OBSERVE = histogram(
    "estimator_observe_seconds",
    "Seconds to process one Observe call, including a fit.",
    buckets=LATENCY_S,
)
WATCHERS = gauge("estimator_watchers", "Open WatchCostModel streams.")
ERROR = gauge(
    "estimator_relative_error",
    "Relative error of a step's estimated time, estimated before learning from the step, by worker "
    "and quantile; the error of the fit while there are too few steps.",
    "worker", "quantile",
)  # fmt: skip
ERROR_STEPS = gauge(
    "estimator_error_steps",
    "Steps in foretoken_estimator_relative_error; 0 while it is the error of the fit.",
    "worker",
)
BATCH_ERROR = gauge(
    "estimator_batch_relative_error",
    "Relative error of a static batch's time, estimated by nearest neighbours before learning from "
    "the batch, by worker and quantile.",
    "worker", "quantile",
)  # fmt: skip
SWAP_TOKEN = gauge(
    "estimator_swap_token_seconds",
    "Seconds to copy the KV of one token between device and host, by worker and direction.",
    "worker", "direction",
)  # fmt: skip
QUANTIZE_TOKEN = gauge(
    "estimator_quantize_token_seconds",
    "Seconds on the device to gather and quantize the KV of one token, sum of both directions of a "
    "swap, by worker.",
    "worker",
)
INVALID = invalid_messages("estimator", "was refused or has a sample that is left out")

ALL = metrics_in(globals())
