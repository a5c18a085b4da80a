"""Metrics of the predictor."""

from collections.abc import Mapping

from prometheus_client import CollectorRegistry

from observability.metrics import predictor as catalogue
from observability.metrics.instruments import Instruments, ReadValue
from observability.metrics.metric import Metric
from services.predictor.learning.plausible import CHECKS
from services.predictor.learning.scorecard import JudgedForecast, ScorecardSummary
from services.predictor.serving.forecaster import PLAIN, REMEMBERED, WORDS
from services.runtime.telemetry.invalid_messages import InvalidMessages


class AccuracyMetrics:
    """How accurate forecasts are, by their outcomes, in the given registry."""

    def __init__(self, registry: CollectorRegistry):
        self._instruments = make = Instruments(registry)
        self.forecasts = make.counter(catalogue.FORECASTS)
        self._outcomes = make.counter(catalogue.OUTCOMES, "yes", "no")
        self._error = make.histogram(catalogue.ERROR)
        self._scored = make.gauge(catalogue.SCORED)
        self._tau = make.gauge(catalogue.TAU)
        self._pinball = make.gauge(catalogue.PINBALL)
        self._drift = make.gauge(catalogue.DRIFT)
        self._coverage = make.gauge(catalogue.COVERAGE)

    def count_outcomes(self, learned: int, skipped: int) -> None:
        self._outcomes.labels("yes").inc(learned)
        self._outcomes.labels("no").inc(skipped)

    def observe_judged(self, source: str, judged: JudgedForecast) -> None:
        """Records the relative error of one forecast by its source."""
        self._error.labels(source).observe(abs(judged.mean - judged.tokens) / judged.tokens)

    def set_scores(self, scores: ScorecardSummary) -> None:
        self._scored.set(scores.count)
        self._tau.set(scores.tau)
        self._pinball.set(scores.pinball_tokens)
        self._drift.set(scores.drift)
        self._coverage.labels("50").set(scores.coverage_50)
        self._coverage.labels("90").set(scores.coverage_90)


class PredictorMetrics(AccuracyMetrics):
    """Prometheus series of one predictor in the given registry."""

    def __init__(self, registry: CollectorRegistry):
        super().__init__(registry)
        make = self._instruments
        self.invalid = InvalidMessages(registry, catalogue.INVALID, "Forecast", "Observe")
        self.forecast_seconds = make.histogram(catalogue.FORECAST)
        self.fallbacks = make.counter(catalogue.FALLBACKS, "failed", "broken", "model")
        self.answered = make.counter(catalogue.ANSWERED, REMEMBERED, WORDS, PLAIN)
        self.read = make.counter(catalogue.READ, "waiting", "ended")
        self.improved = make.counter(catalogue.IMPROVED)
        self.reading_lag = make.histogram(catalogue.READING_LAG)
        self.implausible = make.counter(catalogue.OUTCOMES_IMPLAUSIBLE, *CHECKS)
        self.set_aside = make.gauge(catalogue.SET_ASIDE)
        self.cpu_share = make.gauge(catalogue.CPU_SHARE)
        self._refits = make.counter(catalogue.REFITS, "adopted", "failed")
        self._refit_seconds = make.histogram(catalogue.REFIT)

    def register_readings(self, readings: Mapping[Metric, ReadValue]) -> None:
        """Registers numbers of other parts, which are read at each scrape."""
        for metric, read in readings.items():
            self._instruments.reading(metric, read)

    def count_refit(self, result: str, seconds: float) -> None:
        self._refits.labels(result).inc()
        self._refit_seconds.observe(seconds)
