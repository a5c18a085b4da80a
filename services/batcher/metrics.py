"""What the batcher counts."""

from prometheus_client import CollectorRegistry, Counter, Histogram

from services.runtime.telemetry import LATENCY_BUCKETS_S

POLICY_BUCKETS_S = (0.00002, 0.00005, 0.0001, 0.0002, 0.0005, *LATENCY_BUCKETS_S)


class BatcherMetrics:
    """Prometheus series of one batcher, in the registry given."""

    def __init__(self, registry: CollectorRegistry):
        self.rounds = Counter(
            "foretoken_batcher_rounds", "Planning rounds answered", ["policy"], registry=registry
        )
        self.admitted = Counter(
            "foretoken_batcher_admitted", "Requests admitted", ["policy"], registry=registry
        )
        self.policy_seconds = Histogram(
            "foretoken_batcher_policy_seconds", "Pure policy time of one round, all groups",
            ["policy"], buckets=POLICY_BUCKETS_S, registry=registry,
        )  # fmt: skip
