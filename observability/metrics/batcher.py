"""Metrics of the batcher."""

from observability.metrics.metric import ROUND_S, histogram, invalid_messages, metrics_in

ROUND = histogram(
    "batcher_round_seconds", "Seconds to decode, arrange and answer one round.", "preset",
    buckets=ROUND_S,
)  # fmt: skip
INVALID = invalid_messages("batcher", "ended its stream")

ALL = metrics_in(globals())
