"""Metrics of the batcher."""

from observability.metrics.metric import ROUND_S, histogram, metrics_in

ROUND = histogram(
    "batcher_round_seconds", "Seconds to decode, arrange and answer one round.", "preset",
    buckets=ROUND_S,
)  # fmt: skip

ALL = metrics_in(globals())
