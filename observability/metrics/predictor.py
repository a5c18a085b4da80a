"""Metrics of the predictor: its forecasts, their accuracy, and learning."""

from observability.metrics.metric import (
    FIT_S,
    RATIO,
    counter,
    gauge,
    histogram,
    invalid_messages,
    metrics_in,
)

FORECASTS = counter("predictor_forecasts", "Forecasts made, by source.", "source")
OUTCOMES = counter(
    "predictor_outcomes",
    "Received outcomes of finished requests, by whether they are used for learning (yes, no).",
    "learnt",
)
OUTCOMES_IMPLAUSIBLE = counter(
    "predictor_outcomes_implausible",
    "Reported outcomes with a field that cannot be true. They are neither learned nor logged.",
    "field",
)
FORECAST = histogram("predictor_forecast_seconds", "Seconds to answer one Forecast call.")
ERROR = histogram(
    "predictor_relative_error",
    "Error of the forecast mean as a share of the true length, by source of the forecast.",
    "source", buckets=RATIO,
)  # fmt: skip
FALLBACKS = counter(
    "predictor_fallbacks",
    "Prompts that the model could not embed or forecast, by reason.",
    "reason",
)  # fmt: skip
ANSWERED = counter(
    "predictor_answered",
    "Immediate forecasts, by input: a cached embedding of the prompt (remembered), its words "
    "(words), its embedding (read, in the pure mode), or nothing of it (plain).",
    "stage",
)  # fmt: skip
READ = counter(
    "predictor_read",
    "Embedded prompts, by state of the request: waiting for its outcome, or ended.",
    "of",
)  # fmt: skip
IMPROVED = counter("predictor_improved", "Improved forecasts sent after embedding the prompt.")
READING_LAG = histogram(
    "predictor_reading_lag_seconds", "Seconds from a request to its improved forecast."
)
REFITS = counter("predictor_refits", "Finished fits, by result.", "result")
REFIT = histogram("predictor_refit_seconds", "Seconds of a fit.", buckets=FIT_S)
SET_ASIDE = gauge(
    "predictor_set_aside",
    "Applications where the prompt model is less accurate than history, so that history's "
    "forecasts are used; all applications with few outcomes count as one.",
)
COVERAGE = gauge(
    "predictor_coverage",
    "Share (0 to 1) of recent outcomes inside the forecast's central 50 % or 90 % interval.",
    "interval",
)  # fmt: skip
SCORED = gauge(
    "predictor_scored",
    "Recent outcomes that tau, coverage, pinball loss and drift are computed from.",
)
TAU = gauge(
    "predictor_tau",
    "Kendall's tau-b of forecast means and true lengths: 1 for equal order, 0 for random order.",
)
PINBALL = gauge("predictor_pinball_tokens", "Mean pinball loss of recent forecasts, in tokens.")
DRIFT = gauge(
    "predictor_drift",
    "Calibration drift: Kolmogorov-Smirnov distance (0 to 1) between the quantile levels of the "
    "last 250 outcomes in their forecasts and of the outcomes before.",
)
MODEL_VERSION = gauge("predictor_model_version", "Adopted fits since the start of the process.")
MODEL_AGE = gauge(
    "predictor_model_age_seconds",
    "Seconds since the last fit was adopted; absent before the first fit.",
)
LISTENERS = gauge(
    "predictor_listeners", "Open streams that receive improved forecasts, one per scheduler."
)
UNREAD = gauge("predictor_unread", "Queued prompts of running requests to embed.")
UNREAD_ENDED = gauge(
    "predictor_unread_ended", "Queued prompts of ended requests to embed for learning."
)
UNREAD_DROPPED = counter(
    "predictor_unread_dropped", "Prompts dropped from the full queues for newer ones."
)
IMPROVED_DROPPED = counter(
    "predictor_improved_dropped",
    "Batches of improved forecasts dropped because a listener reads too slowly.",
)
CPU_SHARE = gauge(
    "predictor_cpu_share",
    "Share (0 to 1) of one core used for embedding and learning in the last second.",
)
EXAMPLES = gauge("predictor_examples", "Outcomes with prompts that the model learns from.")
PENDING = gauge("predictor_pending", "Requests without an outcome yet.")
PENDING_DROPPED = counter(
    "predictor_pending_dropped",
    "Requests dropped before their outcome arrived, because too many were pending.",
)
LOG_PENDING = gauge("predictor_log_pending", "Outcomes queued for the outcome log.")
LOG_WRITTEN = counter("predictor_log_written", "Outcomes written to the outcome log.")
LOG_DROPPED = counter(
    "predictor_log_dropped", "Outcomes dropped before they were written to the outcome log."
)
LOG_DELIVERED = counter("predictor_log_delivered", "Outcomes read from the outcome log.")
LOG_UNREADABLE = counter(
    "predictor_log_unreadable", "Rows of the outcome log that could not be used."
)
LOG_FROM_FUTURE = counter(
    "predictor_log_from_future",
    "Rows of the outcome log skipped because a newer foretoken wrote them.",
)
LOG_UNAVAILABLE = gauge(
    "predictor_log_unavailable", "1 while the outcome log is unavailable; else 0."
)
INVALID = invalid_messages("predictor", "was refused")

ALL = metrics_in(globals())
