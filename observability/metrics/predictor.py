"""Metrics of the predictor: its forecasts, their accuracy, and learning."""

from observability.metrics.metric import FIT_S, RATIO, counter, gauge, histogram

FORECASTS = counter("predictor_forecasts", "Forecasts answered, by source.", "source")
OUTCOMES = counter(
    "predictor_outcomes", "Finished requests, by whether they were learned from.", "learnt"
)
FORECAST = histogram("predictor_forecast_seconds", "Time to answer one Forecast call.")
ERROR = histogram(
    "predictor_relative_error",
    "Error of the forecast mean relative to the true length, by source of the forecast.",
    "source", buckets=RATIO,
)  # fmt: skip
FALLBACKS = counter(
    "predictor_fallbacks",
    "Prompts that the model could not read or forecast, by reason.",
    "reason",
)  # fmt: skip
ANSWERED = counter(
    "predictor_answered",
    "Immediate forecasts, by stage: cached result of an earlier reading (remembered), from words "
    "(words), or without the prompt (plain).",
    "stage",
)  # fmt: skip
READ = counter(
    "predictor_read",
    "Prompts read, by state of the request: waiting for its outcome, or ended.",
    "of",
)  # fmt: skip
IMPROVED = counter("predictor_improved", "Improved forecasts sent after the prompt was read.")
READING_LAG = histogram(
    "predictor_reading_lag_seconds", "Time from a request to its improved forecast."
)
REFITS = counter("predictor_refits", "Finished fits, by result.", "result")
REFIT = histogram("predictor_refit_seconds", "Duration of a fit.", buckets=FIT_S)
SET_ASIDE = gauge(
    "predictor_set_aside",
    "1 while the prompt model is less accurate than history, so that history's forecasts are used.",
)
COVERAGE = gauge(
    "predictor_coverage",
    "Share of recent outcomes inside the forecast's central 50 % or 90 % interval.",
    "interval",
)  # fmt: skip
SCORED = gauge("predictor_scored", "Outcomes in the window of tau, coverage, pinball and drift.")
TAU = gauge("predictor_tau", "Kendall's tau-b of forecast means and true lengths.")
PINBALL = gauge("predictor_pinball_tokens", "Mean quantile loss in tokens.")
DRIFT = gauge(
    "predictor_drift",
    "Calibration drift: Kolmogorov-Smirnov distance between the forecast levels of the last 250 "
    "outcomes and of those before.",
)
MODEL_VERSION = gauge("predictor_model_version", "Fits adopted since the start.")
MODEL_AGE = gauge(
    "predictor_model_age_seconds",
    "Time since the last fit was adopted; absent before the first fit.",
)
LISTENERS = gauge("predictor_listeners", "Streams that receive improved forecasts.")
UNREAD = gauge("predictor_unread", "Running requests whose prompts wait to be read.")
UNREAD_ENDED = gauge(
    "predictor_unread_ended", "Ended requests whose prompts wait to be read for learning."
)
UNREAD_DROPPED = counter(
    "predictor_unread_dropped", "Prompts dropped from the reading queues for newer ones."
)
IMPROVED_DROPPED = counter(
    "predictor_improved_dropped",
    "Batches of improved forecasts dropped because a listener was too slow.",
)
CPU_SHARE = gauge(
    "predictor_cpu_share", "Share of one core spent on reading and learning in the last second."
)
EXAMPLES = gauge("predictor_examples", "Outcomes learned together with their prompts.")
PENDING = gauge("predictor_pending", "Requests without an outcome yet.")
PENDING_DROPPED = counter(
    "predictor_pending_dropped",
    "Requests dropped before their outcome arrived, because too many were pending.",
)
LOG_PENDING = gauge("predictor_log_pending", "Outcomes waiting to be written to the outcome log.")
LOG_WRITTEN = counter("predictor_log_written", "Outcomes written to the outcome log.")
LOG_DROPPED = counter(
    "predictor_log_dropped", "Outcomes dropped instead of written to the outcome log."
)
LOG_DELIVERED = counter("predictor_log_delivered", "Outcomes read from the outcome log.")
LOG_UNREADABLE = counter("predictor_log_unreadable", "Unusable rows of the outcome log.")
LOG_FROM_FUTURE = counter(
    "predictor_log_from_future", "Outcome log rows written by a newer foretoken, which are skipped."
)
LOG_UNAVAILABLE = gauge("predictor_log_unavailable", "1 while the outcome log is unavailable.")

ALL = (
    FORECASTS, OUTCOMES, FORECAST, ERROR, FALLBACKS, ANSWERED, READ, IMPROVED, READING_LAG, REFITS,
    REFIT, SET_ASIDE, COVERAGE, SCORED, TAU, PINBALL, DRIFT, MODEL_VERSION, MODEL_AGE, LISTENERS,
    UNREAD, UNREAD_ENDED, UNREAD_DROPPED, IMPROVED_DROPPED, CPU_SHARE, EXAMPLES, PENDING,
    PENDING_DROPPED, LOG_PENDING, LOG_WRITTEN, LOG_DROPPED, LOG_DELIVERED, LOG_UNREADABLE,
    LOG_FROM_FUTURE, LOG_UNAVAILABLE,
)  # fmt: skip
