"""Metrics of the batcher."""

from observability.metrics.metric import ROUND_S, histogram

ROUND = histogram(
    "batcher_round_seconds", "Time to parse, arrange and answer one round.", "preset",
    buckets=ROUND_S,
)  # fmt: skip

ALL = (ROUND,)
