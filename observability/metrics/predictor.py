"""What the predictor counts: its forecasts, how good they were, and what it learns from."""

from observability.metrics.metric import FIT_S, RATIO, counter, gauge, histogram

FORECASTS = counter("predictor_forecasts", "Forecasts made, by their source.", "source")
OUTCOMES = counter(
    "predictor_outcomes", "Finished requests seen, by whether they were learnt.", "learnt"
)
FORECAST = histogram("predictor_forecast_seconds", "Time to forecast one batch.")
ERROR = histogram(
    "predictor_relative_error",
    "Distance of a forecast's mean from the length that came, over that length, by source.",
    "source", buckets=RATIO,
)  # fmt: skip
FALLBACKS = counter(
    "predictor_fallbacks",
    "Prompts that a model was to read or foretell and did not, by the reason.",
    "reason",
)  # fmt: skip
ANSWERED = counter(
    "predictor_answered",
    "Requests answered at once, by what was known: the prompt as read before (remembered), its "
    "words, or nothing of it (plain).",
    "stage",
)  # fmt: skip
READ = counter(
    "predictor_read",
    "Prompts read, of requests that wait for their outcome and of those that have ended.",
    "of",
)  # fmt: skip
IMPROVED = counter("predictor_improved", "Better forecasts told after the prompt was read.")
READING_LAG = histogram("predictor_reading_lag_seconds", "From a request to its better forecast.")
REFITS = counter("predictor_refits", "Fits that ended, by their result.", "result")
REFIT = histogram("predictor_refit_seconds", "Time a fit took.", buckets=FIT_S)
SET_ASIDE = gauge(
    "predictor_set_aside",
    "1 while the model does worse than history and history's forecasts are given.",
)
COVERAGE = gauge(
    "predictor_coverage",
    "Share of the last outcomes inside the forecast's central interval of 50 or 90 %.",
    "interval",
)  # fmt: skip
SCORED = gauge("predictor_scored", "Outcomes that tau, coverage, pinball and drift are taken over.")
TAU = gauge("predictor_tau", "Kendall's tau-b of forecast means and lengths.")
PINBALL = gauge("predictor_pinball_tokens", "Mean quantile loss.")
DRIFT = gauge(
    "predictor_drift",
    "Kolmogorov-Smirnov distance of where the last 250 outcomes lay in their forecasts from where "
    "those before lay.",
)
MODEL_VERSION = gauge("predictor_model_version", "Fits adopted since the start.")
MODEL_AGE = gauge(
    "predictor_model_age_seconds", "Since the last fit was adopted; absent before the first."
)
LISTENERS = gauge("predictor_listeners", "Streams that better forecasts are told to.")
UNREAD = gauge("predictor_unread", "Requests that wait with a prompt to be read.")
UNREAD_ENDED = gauge(
    "predictor_unread_ended", "Requests that have ended, whose prompts wait to be learnt from."
)
UNREAD_DROPPED = counter("predictor_unread_dropped", "Prompts never read: newer ones came.")
IMPROVED_DROPPED = counter(
    "predictor_improved_dropped", "Batches of better forecasts that a listener was too slow for."
)
CPU_SHARE = gauge(
    "predictor_cpu_share", "Of one core, spent on reading and learning since the last look."
)
EXAMPLES = gauge("predictor_examples", "Outcomes learnt with their prompt's features.")
PENDING = gauge("predictor_pending", "Requests whose outcome is awaited.")
PENDING_DROPPED = counter(
    "predictor_pending_dropped", "Requests whose features went before their outcome came."
)
LOG_PENDING = gauge("predictor_log_pending", "Outcomes not yet written to the log.")
LOG_WRITTEN = counter("predictor_log_written", "Outcomes written to the log.")
LOG_DROPPED = counter("predictor_log_dropped", "Outcomes never written to the log.")
LOG_DELIVERED = counter("predictor_log_delivered", "Outcomes read from the log.")
LOG_UNREADABLE = counter("predictor_log_unreadable", "Rows of the log that could not be used.")
LOG_FROM_FUTURE = counter(
    "predictor_log_from_future", "Rows of the log that a newer foretoken wrote."
)
LOG_UNAVAILABLE = gauge("predictor_log_unavailable", "1 while the log cannot be used.")

ALL = (
    FORECASTS, OUTCOMES, FORECAST, ERROR, FALLBACKS, ANSWERED, READ, IMPROVED, READING_LAG, REFITS,
    REFIT, SET_ASIDE, COVERAGE, SCORED, TAU, PINBALL, DRIFT, MODEL_VERSION, MODEL_AGE, LISTENERS,
    UNREAD, UNREAD_ENDED, UNREAD_DROPPED, IMPROVED_DROPPED, CPU_SHARE, EXAMPLES, PENDING,
    PENDING_DROPPED, LOG_PENDING, LOG_WRITTEN, LOG_DROPPED, LOG_DELIVERED, LOG_UNREADABLE,
    LOG_FROM_FUTURE, LOG_UNAVAILABLE,
)  # fmt: skip
