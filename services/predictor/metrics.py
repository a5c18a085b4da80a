"""What the predictor counts."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from services.predictor.learning.learner import Learning
from services.predictor.learning.scorecard import Standing
from services.runtime.outcomelog import Journal
from services.runtime.telemetry import LATENCY_BUCKETS_S

FIT_BUCKETS_S = (1, 2, 5, 10, 20, 40, 80, 160, 320, 640, 1_280)


class PredictorMetrics:
    """Prometheus series of one predictor, in the registry given."""

    def __init__(self, registry: CollectorRegistry):
        self.forecasts = Counter(
            "foretoken_predictor_forecasts", "Forecasts made, by their source", ["source"],
            registry=registry,
        )  # fmt: skip
        self.outcomes = Counter(
            "foretoken_predictor_outcomes", "Finished requests seen, by whether they were learnt",
            ["learnt"], registry=registry,
        )  # fmt: skip
        self.forecast_seconds = Histogram(
            "foretoken_predictor_forecast_seconds", "Time to forecast one batch",
            buckets=LATENCY_BUCKETS_S, registry=registry,
        )  # fmt: skip
        self.fallbacks = Counter(
            "foretoken_predictor_fallbacks",
            "Prompts that a model was to read or foretell and did not, by the reason",
            ["reason"], registry=registry,
        )  # fmt: skip
        self.answered = Counter(
            "foretoken_predictor_answered",
            "Requests answered at once, by what was known: the prompt as read before (remembered), "
            "its words, or nothing of it (plain)",
            ["stage"], registry=registry,
        )  # fmt: skip
        self.read = Counter(
            "foretoken_predictor_read",
            "Prompts read, of requests that wait for their outcome and of those that have ended",
            ["of"], registry=registry,
        )  # fmt: skip
        self.improved = Counter(
            "foretoken_predictor_improved", "Better forecasts told after the prompt was read",
            registry=registry,
        )  # fmt: skip
        self.reading_lag = Histogram(
            "foretoken_predictor_reading_lag_seconds", "From a request to its better forecast",
            buckets=LATENCY_BUCKETS_S, registry=registry,
        )  # fmt: skip
        self.refits = Counter(
            "foretoken_predictor_refits", "Fits that ended, by their result", ["result"],
            registry=registry,
        )  # fmt: skip
        self.refit_seconds = Histogram(
            "foretoken_predictor_refit_seconds", "Time a fit took",
            buckets=FIT_BUCKETS_S, registry=registry,
        )  # fmt: skip
        self.set_aside = Gauge(
            "foretoken_predictor_set_aside",
            "1 while the model does worse than history and history's forecasts are given",
            registry=registry,
        )  # fmt: skip
        self._gauges = {name: _gauge(name, what, registry) for name, what in _GAUGES.items()}
        self._coverage = Gauge(
            "foretoken_predictor_coverage",
            "Share of the last outcomes inside the forecast's central interval",
            ["interval"], registry=registry,
        )  # fmt: skip

    def tell(self, **values: float) -> None:
        """Sets gauges, by their names without the prefix."""
        for name, value in values.items():
            self._gauges[name].set(value)

    def scored(self, scores: Standing) -> None:
        self.tell(
            scored=scores.count,
            tau=scores.tau,
            pinball_tokens=scores.pinball_tokens,
            drift=scores.drift,
        )
        self._coverage.labels("50").set(scores.coverage_50)
        self._coverage.labels("90").set(scores.coverage_90)

    def logged(self, journal: Journal, learning: Learning) -> None:
        self.tell(
            log_pending=journal.pending,
            log_written=journal.written,
            log_dropped=journal.dropped,
            log_delivered=journal.delivered,
            log_unreadable=learning.unreadable + learning.unstudied + journal.undeliverable,
            log_from_future=journal.from_future,
            log_unavailable=journal.unavailable,
        )


_GAUGES = {
    "scored": "Outcomes that tau, coverage, pinball and drift are taken over",
    "tau": "Kendall's tau-b of forecast means and lengths",
    "pinball_tokens": "Mean quantile loss",
    "drift": "Kolmogorov-Smirnov distance of where the last 250 outcomes lay in their forecasts "
    "from where those before lay",
    "model_version": "Fits adopted since the start",
    "model_age_seconds": "Since the last fit was adopted; 0 before the first",
    "listeners": "Streams that better forecasts are told to",
    "unread": "Requests that wait with a prompt to be read",
    "unread_ended": "Requests that have ended, whose prompts wait to be learnt from",
    "unread_dropped": "Prompts never read: newer ones came",
    "improved_dropped": "Batches of better forecasts that a listener was too slow for",
    "cpu_share": "Of one core, spent on reading and learning since the last look",
    "examples": "Outcomes learnt with their prompt's features",
    "pending": "Requests whose outcome is awaited",
    "pending_dropped": "Requests whose features went before their outcome came",
    "log_pending": "Outcomes not yet written to the log",
    "log_written": "Outcomes written to the log",
    "log_dropped": "Outcomes never written to the log",
    "log_delivered": "Outcomes read from the log",
    "log_unreadable": "Rows of the log that could not be used",
    "log_from_future": "Rows of the log that a newer foretoken wrote",
    "log_unavailable": "1 while the log cannot be used",
}


def _gauge(name: str, what: str, registry: CollectorRegistry) -> Gauge:
    return Gauge(f"foretoken_predictor_{name}", what, registry=registry)
