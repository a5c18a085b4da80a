"""What the batcher counts."""

from prometheus_client import CollectorRegistry, Histogram

from services.runtime.telemetry import LATENCY_BUCKETS_S

ROUND_BUCKETS_S = (0.00002, 0.00005, 0.0001, 0.0002, 0.0005, *LATENCY_BUCKETS_S)


class BatcherMetrics:
    """Prometheus series of one batcher, in the registry given."""

    def __init__(self, registry: CollectorRegistry):
        self.round_seconds = Histogram(
            "foretoken_batcher_round_seconds", "Time to parse, arrange and answer one round",
            ["preset"], buckets=ROUND_BUCKETS_S, registry=registry,
        )  # fmt: skip
