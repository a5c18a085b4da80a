"""Spreads: matrices of 64 quantiles per row."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import ArrayLike

from services.predictor.models import spread as sp

rising = hnp.arrays(float, (3, 64), elements=st.floats(0, 3)).map(
    lambda steps: np.exp(np.cumsum(steps / 16, axis=1))
)


def of_lengths(lengths: ArrayLike) -> sp.Floats:
    """A spread of one row from a population's lengths."""
    return sp.from_samples(np.asarray(lengths, float)[None, :])


def test_spread_of_equal_weights_keeps_median_and_ends() -> None:
    spread = of_lengths([10, 20, 30, 40, 50])
    assert spread.shape == (1, 64)
    assert spread[0, 0] == 10 and spread[0, -1] == 50
    assert 29 <= (spread[0, 31] + spread[0, 32]) / 2 <= 31


def test_spread_weights_determine_share_of_points() -> None:
    samples, weights = np.array([[100.0, 5.0, 30.0]]), np.array([[1.0, 2.0, 1.0]])
    row = sp.from_samples(samples, weights)[0]
    assert [(row == x).sum() for x in (5.0, 30.0, 100.0)] == [32, 16, 16]
    assert (np.diff(row) >= 0).all()


@given(rising, st.integers(0, 2**32 - 1))
def test_weighted_quantiles_equal_loop_over_rows(rows: np.ndarray, seed: int) -> None:
    weights = np.random.default_rng(seed).random(rows.shape) + 0.01
    for row, weight, got in zip(rows, weights, sp.from_samples(rows, weights), strict=True):
        mass = np.cumsum(weight) / weight.sum()
        want = [row[np.argmax(mass >= level - 1e-9)] for level in sp.LEVELS]
        assert got == pytest.approx(want)


def test_average_spread_is_between_members() -> None:
    low, high = of_lengths([10, 20, 40]), of_lengths([100, 200, 400])
    assert sp.average([low, high], np.array([[1.0, 0.0]])) == pytest.approx(low)
    assert sp.average([low, high], np.array([[0.5, 0.5]])) == pytest.approx(np.sqrt(low * high))


@given(rising, hnp.arrays(float, 3, elements=st.floats(0, 1)))
def test_quantile_levels_invert_recalibration(rows: np.ndarray, levels: np.ndarray) -> None:
    rows = rows * np.exp(0.01 * np.arange(64))  # without ties, which share one level
    read = sp.recalibrated(rows, np.repeat(levels[:, None], 64, axis=1))[:, 0]
    inside = np.log(np.maximum(read, 1)) == pytest.approx(np.log(read))
    if inside:
        assert sp.quantile_levels(rows, read) == pytest.approx(levels, abs=1e-6)


def test_recalibration_at_own_levels_is_identity() -> None:
    spread = of_lengths(np.geomspace(3, 900, 200))
    assert sp.recalibrated(spread, sp.LEVELS) == pytest.approx(spread)


@given(rising, st.integers(0, 100))
def test_forecasts_keep_quantiles(rows: np.ndarray, version: int) -> None:
    for row, forecast in zip(rows, sp.forecasts(rows, "x", version), strict=True):
        assert (forecast.source, forecast.version) == ("x", version)
        got = [forecast.quantile(float(level)) for level in sp.LEVELS]
        assert got == pytest.approx(row, abs=0.051)


def test_extreme_outcomes_keep_forecasts_finite() -> None:
    """Outcomes a thousandth and a thousand times the forecast length."""
    spread = of_lengths([99.0, 100.0, 101.0])
    levels = sp.quantile_levels(np.repeat(spread, 2, axis=0), np.array([0.1, 100_000.0]))
    read = sp.recalibrated(spread, np.linspace(levels[0], levels[1], 64))
    assert read.min() >= 99 / 4.01 and read.max() <= 101 * 4.01
    assert sp.forecasts(np.full((1, 64), 1e12), "x", 1)[0].max_tokens == 2**20
