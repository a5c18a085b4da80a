"""Quantiles of a histogram in Prometheus' text format."""

from collections.abc import Sequence
from itertools import pairwise
from math import inf

from prometheus_client.parser import text_string_to_metric_families


def read_buckets(text: str, family: str) -> list[tuple[float, float]]:
    """The upper bounds of a histogram's buckets and the observations up to each, ascending, the sum
    of all its series. Empty without the family."""
    counts: dict[float, float] = {}
    for each in text_string_to_metric_families(text):
        if each.name == family:
            for sample in each.samples:
                if sample.name == f"{family}_bucket":
                    bound = float(sample.labels["le"])
                    counts[bound] = counts.get(bound, 0.0) + sample.value
    return sorted(counts.items())


def quantile(buckets: Sequence[tuple[float, float]], share: float) -> float | None:
    """The quantile, interpolated linearly within its bucket as PromQL's `histogram_quantile` does:
    beyond the last finite bound it is that bound. None without observations. O(buckets)."""
    if not buckets or not buckets[-1][1]:
        return None
    rank = share * buckets[-1][1]
    for (lower, before), (upper, count) in pairwise([(0.0, 0.0), *buckets]):
        if count >= rank and count > before:
            if upper == inf:
                return lower
            return lower + (upper - lower) * (rank - before) / (count - before)
    raise AssertionError("the last bucket has all observations")
