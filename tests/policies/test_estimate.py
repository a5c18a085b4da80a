"""Estimated batch durations: worked examples, and nearest neighbours against brute force."""

from math import hypot, inf, log2, nan

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.costs import BatchTiming, CostModel, Neighbours
from services.forecast import Floats
from services.policies.estimate import CHUNK, ESTIMATES, REACH, knn, linear

COST = CostModel(0.01, 0.0002, 0.001, 0.00001)


def column(*values: float) -> Floats:
    return np.array(values, float)


def with_batches(*batches: BatchTiming, k: int = 5) -> CostModel:
    return CostModel(0.01, 0.0002, 0.001, 0.00001, neighbours=Neighbours.fit(batches, k))


def test_linear_estimate_matches_worked_example() -> None:
    """Two prompts of 10 tokens, 3 steps. Prefill: 0.01 + 20·0.0002 + 20·0.00001 = 0.0142. A step
    costs 0.01 + 2·0.001 = 0.012 and reads 2·11, 2·12, 2·13 = 72 tokens in all: 0.036 + 0.00072."""
    [seconds] = linear(COST, column(2), column(10), column(3))
    assert seconds == pytest.approx(0.0142 + 0.036 + 0.00072)


@given(st.integers(1, 64), st.integers(0, 4_096), st.integers(0, 300))
def test_linear_estimate_equals_sum_of_steps(seqs: int, length: int, steps: int) -> None:
    """SCLS, Eq. 2, step by step."""
    summed = COST.step_s(seqs * length, 0, seqs * length) + sum(
        COST.step_s(0, seqs, seqs * (length + k)) for k in range(1, steps + 1)
    )
    assert COST.serve_s(seqs, length, steps) == pytest.approx(summed)
    assert linear(COST, column(seqs), column(length), column(steps)) == pytest.approx([summed])


def test_cost_model_covers_scls_coefficients() -> None:
    """Eq. 3: p1·N·L + p2·N + p3·L + p4, and Eq. 4: d1·N·l + d2·N + d3·l + d4, for N = 4, L = 100:
    p1 = 0.0002 + 0.00001, p4 = 0.01; d1 = 0.00001, d2 = 0.001, d4 = 0.01."""
    prefill_s = 0.00021 * 4 * 100 + 0.01
    tau_s = [0.00001 * 4 * length + 0.001 * 4 + 0.01 for length in (101, 102)]
    assert COST.serve_s(4, 100, 0) == pytest.approx(prefill_s)
    assert COST.serve_s(4, 100, 2) == pytest.approx(prefill_s + sum(tau_s))


@given(st.integers(1, 2_000), st.integers(0, 2_000))
def test_cost_model_covers_alise_estimate(prompt: int, made: int) -> None:
    """ALISE: T = s·T0 + n·(α·s + β) for one request of s prompt tokens and n output tokens. T0
    is the prefill of a token, α a context token, β a step and its sequence. Our model adds the
    step of the prefill and the growth of the context by n·(n+1)/2, which ALISE keeps constant."""
    t0 = COST.prefill_token_s + COST.context_token_s
    alpha, beta = COST.context_token_s, COST.base_s + COST.decode_seq_s
    alise_s = prompt * t0 + made * (alpha * prompt + beta)
    grown = made * (made + 1) / 2 * alpha
    assert COST.serve_s(1, prompt, made) == pytest.approx(alise_s + COST.base_s + grown)


def test_estimators_broadcast_columns() -> None:
    seqs = np.arange(1.0, 4.0)
    for estimate in ESTIMATES.values():
        reported = estimate(COST, seqs, column(50), column(16))
        assert reported == pytest.approx([COST.serve_s(n, 50, 16) for n in (1, 2, 3)])
        assert estimate(COST, column(), column(), column()).shape == (0,)


def test_knn_without_batches_equals_linear() -> None:
    asked = column(1, 8), column(10, 500), column(3, 128)
    assert knn(COST, *asked) == pytest.approx(linear(COST, *asked))


def test_knn_averages_nearest_batches() -> None:
    """k = 2 of three batches of 7 × 127 tokens; log2(1 + x) = 3, 7 and 5, 5.04, 5.17."""
    served = [
        BatchTiming(7, 127, 31, 4.0),
        BatchTiming(7, 127, 32, 5.0),
        BatchTiming(7, 127, 35, 9),
    ]
    [seconds] = knn(with_batches(*served, k=2), column(7), column(127), column(31))
    assert seconds == pytest.approx((4.0 + 5.0) / 2)


def test_knn_includes_ties_of_last_neighbour() -> None:
    """k = 2 of three equal batches: all three count, in any order."""
    alike = [BatchTiming(7, 127, 31, seconds) for seconds in (1.0, 2.0, 6.0)]
    further = BatchTiming(7, 127, 35, 100.0)
    for served in ([*alike, further], [further, *alike[::-1]]):
        [seconds] = knn(with_batches(*served, k=2), column(7), column(127), column(31))
        assert seconds == pytest.approx(3.0)


def test_knn_fills_missing_neighbours_with_linear_estimate() -> None:
    """One of two batches is 16 times as long and too far: 3 of 4 neighbours are the linear
    estimate."""
    cost = with_batches(BatchTiming(4, 100, 50, 8.0), BatchTiming(4, 1_600, 50, 80.0), k=4)
    own = cost.serve_s(4, 100, 50)
    assert knn(cost, column(4), column(100), column(50)) == pytest.approx([(8.0 + 3 * own) / 4])
    far = knn(cost, column(64), column(2), column(2))
    assert far == pytest.approx([cost.serve_s(64, 2, 2)])


BATCHES = st.builds(
    BatchTiming,
    st.integers(1, 64),
    st.integers(1, 2_000),
    st.integers(1, 2_000),
    st.floats(0.01, 100),
)


@settings(deadline=None)
@given(
    st.lists(BATCHES, max_size=30),
    st.integers(1, 7),
    st.lists(st.tuples(*[st.integers(1, 2_000)] * 3), min_size=1, max_size=4),
)
def test_knn_matches_brute_force(
    served: list[BatchTiming], k: int, asked: list[tuple[int, int, int]]
) -> None:
    """The reference uses square roots instead of matrix products."""
    cost = with_batches(*served, k=k)
    reported = knn(cost, *np.array(asked, float).T)
    for batch, seconds in zip(asked, reported, strict=True):
        ranked = sorted((_distance(batch, b), b.elapsed_s) for b in served)
        last = ranked[k - 1][0] if len(ranked) >= k else REACH
        near = [s for d, s in ranked if d <= min(REACH, last + 1e-6)]
        edges = (abs(d - edge) for d, _ in ranked for edge in (REACH, last) if d != edge)
        if any(apart < 1e-4 for apart in edges):
            continue  # rounding decides
        elsewhere = max(0, k - len(near))
        expected = (sum(near) + elsewhere * cost.serve_s(*batch)) / (len(near) + elsewhere)
        assert seconds == pytest.approx(expected)


def _distance(asked: tuple[int, int, int], served: BatchTiming) -> float:
    features = (served.seqs, served.length_tokens, served.generated_tokens)
    apart = [log2(1 + a) - log2(1 + b) for a, b in zip(asked, features, strict=True)]
    return hypot(*apart)


def test_knn_in_chunks_equals_knn_one_by_one() -> None:
    cost = with_batches(*(BatchTiming(n, 100, 50, n / 3) for n in range(1, 20)))
    seqs = np.tile(np.arange(1.0, 20.0), CHUNK // 8)
    reported = knn(cost, seqs, column(100), column(50))
    alone = [float(knn(cost, column(n), column(100), column(50))[0]) for n in range(1, 20)]
    assert reported == pytest.approx(np.tile(alone, CHUNK // 8))


def test_invalid_neighbours_are_rejected() -> None:
    batch = BatchTiming(1, 1, 1, 1.0)
    assert len(Neighbours.fit([batch] * 256)) == 256
    for rows, k in [((1.0,) * 4 * 257, 5), ((1.0,) * 5, 5), ((), 0), ((), 257)]:
        with pytest.raises(ValueError, match="at most 256 batches, and k 1 to 256"):
            Neighbours(rows, k)
    for seconds in (nan, inf, -1.0):
        with pytest.raises(ValueError, match="finite and not negative"):
            Neighbours((1.0, 1.0, 1.0, seconds))
