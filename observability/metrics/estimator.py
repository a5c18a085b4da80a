"""What the estimator counts: timings that came, and how well its cost models foretell them."""

from observability.metrics.metric import LATENCY_S, counter, gauge, histogram

SAMPLES = counter("estimator_samples", "Step timings seen, by whether they could be used.", "used")
SWAPS = counter("estimator_swaps", "Swap timings seen, by whether they could be used.", "used")
BATCHES = counter("estimator_batches", "Batch timings seen, by whether they could be used.", "used")
REFITS = counter("estimator_refits", "Cost models fitted.")
OBSERVE = histogram(
    "estimator_observe_seconds", "Time to take in timings, a fit included.", buckets=LATENCY_S
)
WATCHERS = gauge("estimator_watchers", "Open WatchCostModel streams.")
ERROR = gauge(
    "estimator_relative_error",
    "Relative error of the newest model's steps, each told before it was learnt from; while there "
    "were too few of those, of its fit; by worker.",
    "worker", "quantile",
)  # fmt: skip
ERROR_STEPS = gauge(
    "estimator_error_steps",
    "Steps behind foretoken_estimator_relative_error; 0: it is of the fit.",
    "worker",
)
BATCH_ERROR = gauge(
    "estimator_batch_relative_error",
    "Relative error of whole batches' times, told by their neighbours before they were learnt "
    "from, by worker.",
    "worker", "quantile",
)  # fmt: skip
SWAP_TOKEN = gauge(
    "estimator_swap_token_seconds",
    "Seconds a token of KV takes to host memory and back, by the worker's newest model.",
    "worker", "direction",
)  # fmt: skip
QUANTIZE_TOKEN = gauge(
    "estimator_quantize_token_seconds",
    "Seconds of the device's own of a token of KV to host memory and back, by the worker's newest "
    "model: gathering, quantizing where it rests as INT8, and back.",
    "worker",
)

ALL = (
    SAMPLES, SWAPS, BATCHES, REFITS, OBSERVE, WATCHERS, ERROR, ERROR_STEPS, BATCH_ERROR, SWAP_TOKEN,
    QUANTIZE_TOKEN,
)  # fmt: skip
