"""Searches: exact on thresholds, bounded, and correct for predicates that are not monotone."""

from math import ceil, inf, log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.capacity.search import (
    MAX_TRIES,
    TOLERANCE,
    RateLimit,
    find_fewest,
    find_largest_rate,
)


@given(threshold=st.integers(1, 300), most=st.integers(1, 300))
@pytest.mark.property
def test_find_fewest_finds_a_threshold_in_few_tries(threshold: int, most: int):
    tried: list[int] = []

    def keeps(workers: int) -> bool:
        tried.append(workers)
        return workers >= threshold

    assert find_fewest(keeps, most) == (threshold if threshold <= most else None)
    assert len(tried) == len(set(tried)) <= 2 * ceil(log2(most)) + 1
    assert max(tried) <= most


@given(kept=st.sets(st.integers(1, 40)), most=st.integers(1, 40))
@pytest.mark.property
def test_find_fewest_tried_one_less_when_more_can_hurt(kept: set[int], most: int):
    tried: dict[int, bool] = {}

    def keeps(workers: int) -> bool:
        tried[workers] = workers in kept
        return tried[workers]

    found = find_fewest(keeps, most)
    if found is None:
        assert tried[most] is False
    else:
        assert tried[found]
        assert found == 1 or tried[found - 1] is False


@given(
    threshold=st.floats(0.01, 1_000), start=st.floats(0.1, 100), factor=st.sampled_from([1, 4, 100])
)
@pytest.mark.property
def test_find_largest_rate_encloses_a_threshold(threshold: float, start: float, factor: int):
    tried: list[float] = []

    def keeps(rate: float) -> bool:
        tried.append(rate)
        return rate <= threshold

    most = start * factor
    limit = find_largest_rate(keeps, start, most)
    assert limit.kept <= threshold < limit.missed
    assert {limit.kept, limit.missed} <= {0.0, inf, *tried}
    assert len(tried) <= MAX_TRIES
    assert max(tried) <= most
    if start / 16 < threshold < min(most, 16 * start):
        assert limit.missed <= limit.kept * (1 + TOLERANCE)


def test_find_largest_rate_tries_none_below_the_least():
    tried: list[float] = []

    def misses(rate: float) -> bool:
        tried.append(rate)
        return False

    assert find_largest_rate(misses, 8.0, 64.0, least=3.0) == RateLimit(0.0, 3.0)
    assert tried == [8.0, 4.0, 3.0]
    assert find_largest_rate(lambda _: True, 1.0, 4.0, least=4.0) == RateLimit(4.0, inf)


def test_find_largest_rate_tries_by_hand():
    tried: list[float] = []

    def keeps(rate: float) -> bool:
        tried.append(rate)
        return rate <= 5

    limit = find_largest_rate(keeps, 2.0, 64.0)
    assert tried[:4] == [2.0, 4.0, 8.0, pytest.approx(32**0.5)]
    assert limit.kept == pytest.approx(2 ** (2 + 5 / 16))  # 4 · (8 / 4)^(5/16) = 4.97
    assert limit.missed == pytest.approx(2 ** (2 + 6 / 16))
    assert find_largest_rate(lambda _: True, 2.0, 7.0) == RateLimit(7.0, inf)
    assert find_largest_rate(lambda _: False, 2.0, 7.0) == RateLimit(
        0.0, 2.0 / 2 ** (MAX_TRIES - 1)
    )
