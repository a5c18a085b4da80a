"""What the predictor counts."""

from prometheus_client import CollectorRegistry, Counter, Histogram

from services.runtime.telemetry import LATENCY_BUCKETS_S


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
