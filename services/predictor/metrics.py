"""What the predictor counts."""

from collections.abc import Mapping

from prometheus_client import CollectorRegistry

from observability.metrics import predictor as catalogue
from observability.metrics.instruments import Instruments
from observability.metrics.metric import Metric
from observability.metrics.reading import Look
from services.predictor.learning.scorecard import Judged, Standing
from services.predictor.serving.forecaster import PLAIN, REMEMBERED, WORDS
from services.runtime.outcomelog import Journal

_GAUGES = (
    catalogue.SCORED, catalogue.TAU, catalogue.PINBALL, catalogue.DRIFT, catalogue.MODEL_VERSION,
    catalogue.LISTENERS, catalogue.UNREAD, catalogue.UNREAD_ENDED, catalogue.CPU_SHARE,
    catalogue.EXAMPLES, catalogue.PENDING, catalogue.LOG_PENDING, catalogue.LOG_UNAVAILABLE,
)  # fmt: skip


class PredictorMetrics:
    """Prometheus series of one predictor, in the registry given."""

    def __init__(self, registry: CollectorRegistry):
        self._make = make = Instruments(registry)
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

    def read_from(self, kept: Mapping[Metric, Look]) -> None:
        """What others count anyway is looked at when it is asked for."""
        for metric, look in kept.items():
            self._make.reading(metric, look)

    def tell(self, **values: float) -> None:
        """Sets gauges, by their names without the prefix."""
        for name, value in values.items():
            self._gauges[name].set(value)

    def judged(self, source: str, judged: Judged) -> None:
        """What was foretold of one, by whom, beside what came."""
        self._error.labels(source).observe(abs(judged.mean - judged.tokens) / judged.tokens)

    def scored(self, scores: Standing) -> None:
        self.tell(
            scored=scores.count,
            tau=scores.tau,
            pinball_tokens=scores.pinball_tokens,
            drift=scores.drift,
        )
        self._coverage.labels("50").set(scores.coverage_50)
        self._coverage.labels("90").set(scores.coverage_90)

    def logged(self, journal: Journal) -> None:
        self.tell(log_pending=journal.pending, log_unavailable=journal.unavailable)
