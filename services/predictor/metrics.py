"""Metrics of the predictor."""

from collections.abc import Mapping

from prometheus_client import CollectorRegistry

from observability.metrics import predictor as catalogue
from observability.metrics.instruments import Instruments, ReadValue
from observability.metrics.metric import Metric
from services.predictor.learning.scorecard import JudgedForecast, ScorecardSummary
from services.predictor.serving.forecaster import PLAIN, REMEMBERED, WORDS
from services.runtime.outcomelog import Journal

_GAUGES = (
    catalogue.SCORED, catalogue.TAU, catalogue.PINBALL, catalogue.DRIFT, catalogue.MODEL_VERSION,
    catalogue.LISTENERS, catalogue.UNREAD, catalogue.UNREAD_ENDED, catalogue.CPU_SHARE,
    catalogue.EXAMPLES, catalogue.PENDING, catalogue.LOG_PENDING, catalogue.LOG_UNAVAILABLE,
)  # fmt: skip


class PredictorMetrics:
    """Prometheus series of one predictor in the given registry."""

    def __init__(self, registry: CollectorRegistry):
        self._instruments = make = Instruments(registry)
        self.forecasts = make.counter(catalogue.FORECASTS)
        self.outcomes = make.counter(catalogue.OUTCOMES, "yes", "no")
        self.forecast_seconds = make.histogram(catalogue.FORECAST)
        self.fallbacks = make.counter(catalogue.FALLBACKS, "failed", "broken", "model")
        self.answered = make.counter(catalogue.ANSWERED, REMEMBERED, WORDS, PLAIN)
        self.read = make.counter(catalogue.READ, "waiting", "ended")
        self.improved = make.counter(catalogue.IMPROVED)
        self.reading_lag = make.histogram(catalogue.READING_LAG)
        self.refits = make.counter(catalogue.REFITS, "adopted", "failed")
        self.refit_seconds = make.histogram(catalogue.REFIT)
        self.set_aside = make.gauge(catalogue.SET_ASIDE)
        self._error = make.histogram(catalogue.ERROR)
        self._coverage = make.gauge(catalogue.COVERAGE)
        self._gauges = {
            metric.name.removeprefix("predictor_"): make.gauge(metric) for metric in _GAUGES
        }

    def register_readings(self, kept: Mapping[Metric, ReadValue]) -> None:
        """Registers values that other parts count; they are read at each scrape."""
        for metric, read in kept.items():
            self._instruments.reading(metric, read)

    def set_gauges(self, **values: float) -> None:
        """Sets gauges by name, without the `predictor_` prefix."""
        for name, value in values.items():
            self._gauges[name].set(value)

    def judged(self, source: str, judged: JudgedForecast) -> None:
        """Records the relative error of one forecast by its source."""
        self._error.labels(source).observe(abs(judged.mean - judged.tokens) / judged.tokens)

    def set_scorecard(self, scores: ScorecardSummary) -> None:
        self.set_gauges(
            scored=scores.count,
            tau=scores.tau,
            pinball_tokens=scores.pinball_tokens,
            drift=scores.drift,
        )
        self._coverage.labels("50").set(scores.coverage_50)
        self._coverage.labels("90").set(scores.coverage_90)

    def set_log_gauges(self, journal: Journal) -> None:
        self.set_gauges(log_pending=journal.pending, log_unavailable=journal.unavailable)
