"""Forming policies against simple oracles: token-by-token simulation and linear scans."""

from collections.abc import Sequence
from itertools import takewhile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.forecast import Forecast, Ints, certain
from services.policies.decision import WaitReason
from services.policies.form.past_future import PeakDemand, PrefixPeaks, Statistic, largest, mean
from services.policies.form.sums import SumDemand
from tests.examples import examples
from tests.policies.form.peak_oracle import peak_tokens
from tests.policies.made_snapshots import (
    Row,
    count_fitting,
    demanded,
    fill_queue,
    formed,
    jobs,
    node,
    table,
)

held_and_left = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=12)


def simulate(requests: Sequence[tuple[int, int]]) -> int:
    """Grow each request by a token per step, free ended ones, and return the peak of held
    tokens."""
    alive, most = list(requests), sum(held for held, _ in requests)
    while alive := [(held, left) for held, left in alive if left > 0]:
        alive = [(held + 1, left - 1) for held, left in alive]
        most = max(most, sum(held for held, _ in alive))
    return most


@settings(max_examples=examples(300))
@given(held_and_left)
def test_peak_matches_simulation(requests: list[tuple[int, int]]) -> None:
    held, left = np.array(requests, np.int64).reshape(-1, 2).T
    assert peak_tokens(held, left) == simulate(requests)


@settings(max_examples=examples(200))
@given(held_and_left, held_and_left, st.integers(0, 2**32))
def test_prefix_peaks_match_mean_of_simulations(
    running: list[tuple[int, int]], queued: list[tuple[int, int]], seed: int
) -> None:
    rows = [*running, *queued]
    rng = np.random.default_rng(seed)
    futures = rng.integers(0, 60, (3, len(rows)))
    held = np.array([h for h, _ in rows], float)
    peaks = PrefixPeaks(len(running), held, futures.astype(float))
    seen = []
    for k in range(len(queued) + 1):
        n = len(running) + k
        each = [
            simulate(list(zip(held[:n].astype(int), future[:n], strict=True))) for future in futures
        ]
        assert peaks(k) == pytest.approx(np.mean(each))
        assert peaks(k) == pytest.approx(
            np.mean([peak_tokens(held[:n], future[:n]) for future in futures])
        )
        seen.append(peaks(k))
    assert seen == sorted(seen)


row = st.tuples(st.integers(1, 40), st.integers(0, 20), st.integers(1, 60)).map(
    lambda r: (r[0], r[1], r[1] + r[2])
)


@settings(max_examples=examples(300))
@given(
    st.integers(1, 600),
    st.lists(row, max_size=6),
    st.lists(row, max_size=40),
    st.integers(1, 30),
    st.sampled_from([0.0, 0.05, 0.3]),
)
def test_past_future_matches_linear_scan(
    kv_tokens: int, running: list[Row], queued: list[Row], most: int, reserved: float
) -> None:
    limit = (1 - reserved) * kv_tokens

    def need(k: int) -> int:
        return simulate([(p + g, length - g) for p, g, length in [*running, *queued[:k]]])

    room = range(1, min(len(queued), max(0, most - len(running))) + 1)
    scanned = len(list(takewhile(lambda k: need(k) <= limit, room)))
    if not scanned and not running and room and queued[0][0] + queued[0][2] <= kv_tokens:
        scanned = 1
    admit, filled = formed("past_future", kv_tokens, running, queued, {"reserved": reserved}, most)
    assert admit == scanned
    assert filled.peaks[0] == pytest.approx(need(scanned))


@settings(max_examples=examples(200))
@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=12),
    st.integers(0, 300),
    st.one_of(st.none(), st.integers(0, 2**32)),
    st.sampled_from([mean, largest]),
    st.data(),
)
def test_longest_prefix_matches_linear_scan(
    holds: list[int], limit: int, seed: int | None, statistic: Statistic, data: st.DataObject
) -> None:
    """Check random orders of random subsets behind a random base, with and without drawn
    lengths."""
    order: Ints = np.array(data.draw(st.permutations(range(len(holds)))), np.int64)
    order = order[: data.draw(st.integers(0, len(holds)))]
    base = data.draw(st.integers(0, len(order)))
    most = data.draw(st.integers(0, len(order) - base))
    held = np.array(holds, float)
    left = np.zeros((1, len(holds)))
    if seed is not None:
        left = np.random.default_rng(seed).integers(0, 60, (3, len(holds))).astype(float)

    def need(count: int) -> float:
        among = order[: base + count]
        return statistic(np.array([peak_tokens(held[among], each[among]) for each in left]))

    limits = np.array([float(limit)])
    drawn = PeakDemand(held, limits, [left], statistic)
    demand = SumDemand(held, limits) if seed is None else drawn
    fits, reported = count_fitting(demand, order, base, most)
    assert fits == len(list(takewhile(lambda k: need(k) <= limit, range(1, most + 1))))
    asked = [fits, *([fits + 1] if fits < most else [])]
    assert [reported(k) for k in asked] == pytest.approx([need(k) for k in asked])


@settings(max_examples=examples(100))
@given(st.integers(200, 20_000), st.integers(0, 20), st.integers(0, 200), st.integers(0, 2**32))
def test_past_future_search_matches_linear_scan_with_drawn_lengths(
    kv_tokens: int, running: int, queued: int, seed: int
) -> None:
    """With uncertain lengths the peaks rise in uneven steps, which must not mislead the search."""
    rng = np.random.default_rng(seed)
    count = running + queued
    made = jobs(
        count,
        prompt=rng.integers(1, 300, count),
        cap=np.full(count, 900),
        forecast=rng.integers(0, 2, count),
    )
    forecasts = table(Forecast((5.0, 800.0), (0.7, 0.3), 800), certain(60))
    worker = node(kv_tokens=kv_tokens)
    demand = demanded("past_future", made, worker, forecasts, {"reserved": 0.0}, seed)
    filled = fill_queue(np.arange(count) < running, demand, 300, alone=True)
    assert isinstance(demand, PeakDemand)
    (left,) = demand.remaining

    def need(k: int) -> float:
        n = running + k
        return float(np.mean([peak_tokens(demand.held[:n], each[:n]) for each in left]))

    scanned = len(list(takewhile(lambda k: need(k) <= kv_tokens, range(1, queued + 1))))
    if not scanned and not running and queued:
        scanned = 1
    assert np.count_nonzero(filled.runs_next) - running == scanned
    if scanned < queued:
        assert filled.reasons[running + scanned] == WaitReason.MEMORY
        assert filled.first_values[running + scanned] == pytest.approx(need(scanned + 1))
