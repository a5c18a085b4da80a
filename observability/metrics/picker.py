"""Metrics of the endpoint picker. `endpoint` is IP:PORT; after the first 256, `other`."""

from observability.metrics.metric import (
    ROUND_S,
    counter,
    gauge,
    histogram,
    invalid_messages,
    metrics_in,
)

PICKS = counter("picker_picks", "Requests placed, by endpoint.", "endpoint")
REFUSED = counter(
    "picker_refused",
    "Requests refused, by cause: no_endpoint (503), shed or full (429), too_large (413), "
    "bad_header (400).",
    "cause",
)  # fmt: skip
ENDED = counter(
    "picker_ended",
    "Placed requests that ended, by result: complete, error (status 400 or more), or broken (no "
    "end of the answer).",
    "result",
)  # fmt: skip
PICK = histogram(
    "picker_pick_seconds",
    "Seconds from the end of a request's body to its placement, with the forecast.",
    buckets=ROUND_S,
)  # fmt: skip
TTFT = histogram(
    "picker_time_to_first_token_seconds",
    "Seconds from placement to the first token of a streamed answer.",
)
FORESEEN = histogram(
    "picker_expected_time_to_first_token_seconds",
    "Expected seconds from placement to the first token.",
)
TOKENS = counter("picker_output_tokens", "Output tokens of ended answers.")
CACHED = counter(
    "picker_prefix_cached_tokens", "Prompt tokens expected to be cached at the endpoint picked."
)
IN_FLIGHT = gauge("picker_requests_in_flight", "Requests placed and not ended.")
ENDPOINTS = gauge(
    "picker_endpoints",
    "Endpoints by health: ready, stale (metrics are late) or lost (no answer; not picked).",
    "health",
)  # fmt: skip
SCRAPES = counter(
    "picker_scrapes", "Scrapes of model servers, by result: read, failed, late.", "result"
)  # fmt: skip
FALLBACKS = counter(
    "picker_forecast_fallbacks",
    "Forecasts by recent lengths instead of the predictor's, by reason: late, failed, or open "
    "(the circuit breaker is).",
    "reason",
)  # fmt: skip
OUTCOMES_DROPPED = counter(
    "picker_outcomes_dropped", "Outcomes dropped before the predictor received them."
)
INVALID = invalid_messages("picker", "ended its stream")

ALL = metrics_in(globals())
