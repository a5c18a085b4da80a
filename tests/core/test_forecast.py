"""Forecast arithmetic: hand-worked values, laws, and draws against the empirical distribution."""

from dataclasses import replace
from math import exp, log

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare, ks_2samp

from services.forecast import MAX_POINTS, UNCAPPED, Forecast, certain, from_lengths
from tests.core.forecasts import forecasts
from tests.policies.made_snapshots import table as interned

HAND = Forecast((10.0, 20.0, 40.0), (0.5, 0.25, 0.25), 64)


def test_forecast_survival_quantile_and_mean_match_worked_example() -> None:
    assert HAND.survival(9) == 1
    assert HAND.survival(10) == 0.5
    assert HAND.survival(20, generated=10) == 0.5
    assert HAND.survival(5, generated=10) == 1
    assert HAND.survival(64) == 0
    assert [HAND.quantile(q) for q in (0, 0.5, 0.51, 0.75, 0.76, 1)] == [10, 10, 20, 20, 40, 40]
    assert HAND.quantile(0.5, generated=10) == 20
    assert HAND.mean() == 20
    assert HAND.mean(generated=10) == 30
    assert HAND.mean_remaining(generated=12) == 18


def test_output_beyond_forecast_is_expected_to_be_as_long_again() -> None:
    """Past 40 tokens the rest is exponential with a mean of 40, cut at 64 tokens in total. A draw
    is Past-Future's: max_tokens."""
    assert HAND.mean(generated=40) == pytest.approx(40 + 40 * (1 - exp(-24 / 40)))
    assert HAND.mean(generated=50) == pytest.approx(50 + 40 * (1 - exp(-14 / 40)))
    assert HAND.quantile(0.1, generated=40) == pytest.approx(40 - 40 * log(0.9))
    assert HAND.quantile(0.01, generated=40) == 41
    assert [HAND.quantile(q, generated=40) for q in (0.5, 1)] == [64, 64]
    assert HAND.survival(50, generated=45) == pytest.approx(exp(-5 / 40))
    assert HAND.survival(64, generated=45) == 0
    assert HAND.sample(np.random.default_rng(0), generated=40) == 64


def test_forecast_of_an_answer_with_a_least_length_matches_worked_example() -> None:
    assert HAND.at_least(10) is HAND
    assert HAND.at_least(11) == replace(HAND, points=(20.0, 40.0), weights=(0.5, 0.5))
    assert HAND.at_least(40) == replace(HAND, points=(40.0,), weights=(1.0,))
    beyond = HAND.at_least(50)
    assert 50 <= beyond.points[0] < 51 and beyond.points[-1] == HAND.max_tokens == 64
    assert beyond.mean() == pytest.approx(HAND.mean(49), abs=0.5)
    assert HAND.at_least(100) == replace(HAND, points=(64.0,), weights=(1.0,))


@given(forecasts(), st.integers(0, 600), st.integers(0, 500))
def test_least_length_bounds_a_forecast_as_progress_does(f: Forecast, least: int, g: int) -> None:
    bounded = f.at_least(least)
    assert bounded.points[0] >= min(least, f.max_tokens)
    assert (bounded.max_tokens, bounded.source) == (f.max_tokens, f.source)
    if least <= f.points[-1]:
        assert bounded.mean(g) == pytest.approx(f.mean(max(g, least - 1)))


@given(forecasts(), st.data())
def test_expectation_past_the_last_point_is_monotone_and_within_the_cap(
    f: Forecast, data: st.DataObject
) -> None:
    """No jump to the cap: at the last point the survival starts at 1, the expected rest is at most
    that point, and the expected length rises with progress."""
    last = f.points[-1]
    cap = data.draw(st.integers(int(last) + 1, 4_000))
    f = replace(f, max_tokens=cap)
    g, h = sorted(data.draw(st.tuples(*2 * [st.integers(0, cap)])))
    assert f.mean(g) <= f.mean(h) + 1e-9 <= cap + 1e-6
    at = int(last)
    assert f.survival(at + 1, at) >= exp(-1 / last) * (cap > at + 1)
    assert 0 < f.mean_remaining(at) <= min(last, cap - at)
    chances = [f.survival(at + n, at) for n in range(0, cap - at + 1, 7)]
    assert chances[0] == 1
    assert chances == sorted(chances, reverse=True)


def test_forecast_past_cap_has_nothing_remaining() -> None:
    rng = np.random.default_rng(0)
    for g in (64, 65, 1_064):
        assert (HAND.mean(g), HAND.quantile(0.5, g), HAND.sample(rng, g)) == (g, g, g)
        assert HAND.mean_remaining(g) == 0


def test_capped_mean_matches_worked_example() -> None:
    assert HAND.mean(most=30) == 0.5 * 10 + 0.25 * 20 + 0.25 * 30
    assert HAND.mean(generated=10, most=30) == 25
    assert HAND.mean(generated=20, most=30) == 30
    assert HAND.mean(generated=35, most=30) == 35
    assert HAND.mean_remaining(generated=12, most=30) == 13
    shared = Forecast((5.0, UNCAPPED), (0.5, 0.5), UNCAPPED, "history", 1, "history/demo")
    assert shared.mean(most=101) == 53
    assert shared.mean_remaining(generated=7, most=101) == 94


@given(forecasts(), st.data())
def test_capped_mean_equals_mean_of_truncated_forecast(f: Forecast, data: st.DataObject) -> None:
    cap = data.draw(st.integers(1, f.max_tokens + 5))
    g = data.draw(st.integers(0, f.max_tokens + 5))
    expected = f.truncated(min(cap, f.max_tokens)).mean(g)
    assert f.mean(g, cap) == pytest.approx(expected)
    assert f.mean_remaining(g, cap) >= 0


def test_truncation_moves_mass_to_cap() -> None:
    assert HAND.truncated(30) == Forecast((10.0, 20.0, 30.0), (0.5, 0.25, 0.25), 30)
    assert HAND.truncated(20) == Forecast((10.0, 20.0), (0.5, 0.5), 20)
    assert HAND.truncated(5) == Forecast((5.0,), (1.0,), 5)
    assert HAND.truncated(100) == Forecast(HAND.points, HAND.weights, 100)
    assert HAND.truncated(64) is HAND


@pytest.mark.parametrize(
    ("points", "weights", "max_tokens", "sentence"),
    [
        ((), (), 9, "1 to 64 points"),
        ((1.0, 2.0), (1.0,), 9, "a weight for each"),
        (tuple(float(i + 1) for i in range(65)), (1 / 65,) * 65, 99, "1 to 64 points"),
        ((2.0, 1.0), (0.5, 0.5), 9, "ascend"),
        ((1.0, 1.0), (0.5, 0.5), 9, "ascend"),
        ((0.0, 1.0), (0.5, 0.5), 9, "lie in"),
        ((1.0, 10.0), (0.5, 0.5), 9, "lie in"),
        ((float("nan"),), (1.0,), 9, "lie in"),
        ((1.0, 2.0), (1.0, 0.0), 9, "positive"),
        ((1.0, 2.0), (0.5, 0.4), 9, "sum to 1"),
    ],
)
def test_invalid_distribution_is_rejected(
    points: tuple[float, ...], weights: tuple[float, ...], max_tokens: int, sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        Forecast(points, weights, max_tokens)


def test_lengths_up_to_64_values_are_kept_exactly() -> None:
    assert from_lengths([3, 1, 3, 2], 9, "history") == Forecast(
        (1.0, 2.0, 3.0), (0.25, 0.25, 0.5), 9, "history"
    )


def test_merged_lengths_keep_mean_mass_and_fine_tail() -> None:
    lengths = np.random.default_rng(1).integers(1, 4_000, 1_000)
    forecast = from_lengths(list(lengths), 4_096, "history", 7, "history/demo")
    assert len(forecast.points) == MAX_POINTS
    assert forecast.mean() == pytest.approx(lengths.mean(), abs=0.01)
    assert (forecast.version, forecast.shared_key) == (7, "history/demo")
    beyond = [p for p in forecast.points if p > np.quantile(lengths, 0.875)]
    assert len(beyond) == MAX_POINTS // 4
    for q in (0.1, 0.5, 0.9, 0.99):
        assert forecast.quantile(q) == pytest.approx(np.quantile(lengths, q), rel=0.06)


@given(forecasts(), st.integers(0, 499), st.integers(0, 600), st.integers(0, 600))
def test_survival_falls_with_tokens(f: Forecast, g: int, a: int, b: int) -> None:
    low, high = sorted((a, b))
    assert 0 <= f.survival(high, g) <= f.survival(low, g) <= 1
    assert f.survival(f.max_tokens, g) == 0


def test_rounded_mean_does_not_exceed_longest_point() -> None:
    f = Forecast((1.0, 399.0), (0.8, 0.2), 399)
    assert 399 * 0.2 / 0.2 > 399
    assert f.mean_remaining(1) == 398


@given(forecasts(), st.data())
def test_remaining_tokens_are_positive_and_within_max_tokens(
    f: Forecast, data: st.DataObject
) -> None:
    g = data.draw(st.integers(0, f.max_tokens - 1))
    q = data.draw(st.floats(0, 1))
    assert 0 < f.mean_remaining(g) <= f.max_tokens - g
    assert g < f.quantile(q, g) <= f.max_tokens


@given(forecasts(), st.data())
def test_quantile_rises_with_q_and_with_progress(f: Forecast, data: st.DataObject) -> None:
    a, b = sorted(data.draw(st.tuples(st.floats(0, 1), st.floats(0, 1))))
    g, h = sorted(data.draw(st.tuples(*2 * [st.integers(0, f.max_tokens - 1)])))
    assert f.quantile(a, g) <= f.quantile(b, g)
    assert f.quantile(a, g) <= f.quantile(a, h)


@given(forecasts(), st.data())
def test_conditioning_commutes_with_truncation(f: Forecast, data: st.DataObject) -> None:
    cap = data.draw(st.integers(1, f.max_tokens))
    g = data.draw(st.integers(0, cap - 1))
    cut = f.truncated(cap)
    for q in (0.0, 0.3, 0.7, 1.0):
        assert cut.quantile(q, g) == min(f.quantile(q, g), cap)
    for tokens in (g, g + 1, (g + cap) // 2):
        if tokens < cap:
            assert cut.survival(tokens, g) == pytest.approx(f.survival(tokens, g))


@given(forecasts(), st.data(), st.integers(0, 2**32))
def test_sampling_is_reproducible_and_table_equals_scalar(
    f: Forecast, data: st.DataObject, seed: int
) -> None:
    others = data.draw(st.lists(forecasts(), max_size=3))
    at = data.draw(st.integers(0, len(others)))
    table = interned(*others[:at], f, *others[at:])
    cap = data.draw(st.integers(1, f.max_tokens))
    g = data.draw(st.integers(0, cap - 1))
    which, generated, caps = (np.array([v]) for v in (at, g, cap))

    drawn = table.sample(np.random.default_rng(seed), which, generated, caps)
    assert drawn == table.sample(np.random.default_rng(seed), which, generated, caps)
    assert drawn[0] == f.truncated(cap).sample(np.random.default_rng(seed), g)
    assert table.mean(which, generated, caps)[0] == pytest.approx(f.truncated(cap).mean(g))


@pytest.mark.parametrize("generated", [0, 40, 150, 290])
def test_draws_follow_conditional_empirical_distribution(generated: int) -> None:
    rng = np.random.default_rng(generated)
    lengths = rng.choice([5, 20, 41, 80, 151, 160, 291, 300], 3_000, p=_P)
    forecast = from_lengths(list(lengths), 512, "history")
    longer, counts = np.unique(lengths[lengths > generated], return_counts=True)
    expected = counts / counts.sum() * 4_000

    scalar = [forecast.sample(rng, generated) for _ in range(4_000)]
    table = interned(certain(9), forecast)
    rows = np.ones(4_000, np.int64)
    (whole,) = table.sample(rng, rows, rows * generated, rows * 512)
    for drawn in (scalar, whole):
        seen = np.array([np.count_nonzero(np.asarray(drawn) == value) for value in longer])
        assert seen.sum() == 4_000
        assert len(longer) == 1 or chisquare(seen, expected).pvalue > 0.001


_P = (0.05, 0.2, 0.2, 0.2, 0.15, 0.1, 0.06, 0.04)


def test_draws_of_merged_lengths_stay_close_to_lengths() -> None:
    """Merging moves a draw by less than half a group: KS below the coarsest group's mass."""
    rng = np.random.default_rng(3)
    lengths = rng.lognormal(5, 1, 1_000).round().clip(1, 4_096)
    forecast = from_lengths(list(lengths), 4_096, "history")
    table, rows = interned(forecast), np.zeros(20_000, np.int64)
    for generated in (0, 100, 300):
        (drawn,) = table.sample(rng, rows, rows + generated, rows + 4_096)
        longer = lengths[lengths > generated]
        kept = [w for p, w in zip(forecast.points, forecast.weights, strict=True) if p > generated]
        assert ks_2samp(drawn, longer).statistic < 1.5 * max(kept) / sum(kept) + 0.02


def test_lengths_within_a_thousandth_are_one_point() -> None:
    near = [100 + i / 10_000 for i in range(200)]
    f = from_lengths([*near, 5.0], 200, "x")
    assert f.mean() == pytest.approx(np.mean([*near, 5.0]), rel=1e-4)


def test_forecast_longer_than_any_context_is_rejected() -> None:
    with pytest.raises(ValueError, match="at most 16777215 tokens"):
        Forecast((2.0**24,), (1.0,), 2**24)
