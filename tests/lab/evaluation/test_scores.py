"""Scores of forecasts: worked examples and slow reference implementations."""

from collections.abc import Sequence
from itertools import combinations
from math import isnan, sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.evaluation.scores import BUCKETS, score
from services.forecast import Forecast, certain
from services.predictor.learning.scorecard import SCORE_LEVELS, tau_b
from services.predictor.models.forest import fold_vectors

COIN = Forecast((10.0, 20.0), (0.5, 0.5), 100)


def test_scores_match_worked_example():
    """An even chance of 10 and 20 for the length 10, and a certain 40 for the length 50."""
    scores = score([COIN, certain(40)], [10, 50])
    assert scores.n == 2
    assert scores.tau == pytest.approx(1.0)
    assert scores.rmse == pytest.approx(sqrt((5**2 + 10**2) / 2))
    assert scores.mae == pytest.approx((5 + 10) / 2)
    assert scores.mean_relative_error == pytest.approx((5 / 10 + 10 / 50) / 2)
    # First: 10 costs 0 up to the median, then 20 costs (1 − level)·10. Second: 40 costs level·10.
    coin = sum((1 - level) * 10 for level in SCORE_LEVELS if level > 0.5) / 19
    assert scores.pinball == pytest.approx((coin + 5.0) / 2)
    assert scores.crps == pytest.approx(((5 - 2.5) + 10) / 2)
    assert (scores.coverage_50, scores.coverage_90) == (0.5, 0.5)
    assert scores.reached == (0.5,) * 19


@pytest.mark.parametrize(
    ("forecast", "length", "right"),
    [
        (5, 9, 1),  # both in [0, 10)
        (10, 9, 0),  # 10 opens the next bucket
        (95, 100, 1),  # the longest length belongs to the last bucket
        (4000, 100, 1),  # as do all longer forecasts
    ],
)
def test_bucket_accuracy_uses_equal_widths(forecast: int, length: int, right: int):
    scores = score([certain(forecast), certain(100)], [length, 100])
    assert scores.bucket_tokens == 10
    assert scores.bucket_accuracy == (right + 1) / 2


@pytest.mark.parametrize(
    ("length", "in_50", "in_90"),
    [(9, 0, 0), (10, 1, 1), (15, 1, 1), (20, 1, 1), (21, 0, 0)],
)
def test_forecast_interval_includes_its_ends(length: int, in_50: int, in_90: int):
    scores = score([COIN], [length])
    assert (scores.coverage_50, scores.coverage_90) == (in_50, in_90)


def test_perfect_forecast_has_no_loss():
    scores = score([certain(7), certain(300)], [7, 300])
    assert (scores.rmse, scores.mae, scores.pinball, scores.crps) == (0, 0, 0, 0)
    assert (scores.tau, scores.bucket_accuracy, scores.coverage_90) == (1, 1, 1)


def test_constant_forecast_has_no_tau():
    assert isnan(score([COIN, COIN], [10, 20]).tau)
    assert isnan(score([certain(5), certain(6)], [10, 10]).tau)
    assert isnan(score([COIN], [10]).tau)


def test_score_rejects_empty_input():
    with pytest.raises(ValueError, match="0 forecasts for 0 lengths"):
        score([], [])
    with pytest.raises(ValueError, match="1 forecasts for 2 lengths"):
        score([COIN], [1, 2])


@st.composite
def forecasts(draw: st.DrawFn) -> Forecast:
    points = sorted(draw(st.sets(st.integers(1, 400), min_size=1, max_size=64)))
    parts = draw(st.lists(st.integers(1, 9), min_size=len(points), max_size=len(points)))
    return Forecast(
        tuple(map(float, points)), tuple(part / sum(parts) for part in parts), points[-1]
    )


JUDGED = st.lists(st.tuples(forecasts(), st.integers(1, 500)), min_size=1, max_size=8)
JudgedForecast = Sequence[tuple[Forecast, int]]


def loop_pinball(judged: JudgedForecast) -> float:
    losses = []
    for forecast, length in judged:
        for level in map(float, SCORE_LEVELS):
            quantile = forecast.quantile(level)
            miss = length - quantile
            losses.append(level * miss if miss > 0 else (level - 1) * miss)
    return sum(losses) / len(losses)


def mass_to(forecast: Forecast, tokens: int) -> float:
    pairs = zip(forecast.points, forecast.weights, strict=True)
    return sum(weight for point, weight in pairs if point <= tokens)


def integral_crps(judged: JudgedForecast) -> float:
    """∫ (P(L ≤ x) − [x ≥ length])² dx as a sum, since both change at whole tokens only."""
    whole = [
        sum((mass_to(forecast, x) - (x >= length)) ** 2 for x in range(501))
        for forecast, length in judged
    ]
    return sum(whole) / len(whole)


@given(JUDGED)
def test_pinball_loss_matches_loop(judged: JudgedForecast):
    scores = score(*map(list, zip(*judged, strict=True)))
    assert scores.pinball == pytest.approx(loop_pinball(judged))


@given(JUDGED)
def test_crps_matches_integral(judged: JudgedForecast):
    scores = score(*map(list, zip(*judged, strict=True)))
    assert scores.crps == pytest.approx(integral_crps(judged), abs=1e-6)


@given(JUDGED)
def test_interval_coverage_matches_quantiles(judged: JudgedForecast):
    scores = score(*map(list, zip(*judged, strict=True)))
    for share, message in ((0.5, scores.coverage_50), (0.9, scores.coverage_90)):
        inside = [
            f.quantile((1 - share) / 2) <= length <= f.quantile((1 + share) / 2)
            for f, length in judged
        ]
        assert message == pytest.approx(sum(inside) / len(inside))
    for level, message in zip(SCORE_LEVELS, scores.reached, strict=True):
        below = [length <= f.quantile(float(level)) for f, length in judged]
        assert message == pytest.approx(sum(below) / len(below))


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=2, max_size=12))
def test_tau_matches_pair_count(pairs: list[tuple[int, int]]):
    signs = [(np.sign(a[0] - b[0]), np.sign(a[1] - b[1])) for a, b in combinations(pairs, 2)]
    apart = [sum(abs(sign[side]) for sign in signs) for side in (0, 1)]
    message = tau_b(*np.array(pairs, float).T)
    if 0 in apart:
        assert isnan(message)
    else:
        agree = sum(a * b for a, b in signs)
        assert message == pytest.approx(agree / sqrt(apart[0] * apart[1]))


def test_bucket_accuracy_uses_ten_buckets():
    assert BUCKETS == 10
    assert list(SCORE_LEVELS[[0, -1]]) == [0.05, 0.95]


def test_fold_vectors_sums_neighbours():
    folded = fold_vectors(np.array([[1.0, 3.0, 5.0, 7.0], [0.0, 0.0, 2.0, 0.0]], np.float32), 2)
    assert folded == pytest.approx(np.array([[4.0, 12.0], [0.0, 2.0]]) / sqrt(2))


def test_fold_vectors_keeps_every_value():
    folded = fold_vectors(np.ones((1, 5), np.float32), 2)
    assert folded == pytest.approx(np.array([[2 / sqrt(2), 3 / sqrt(3)]]))


@pytest.mark.parametrize("values", [0, 5])
def test_fold_vectors_rejects_too_many_values(values: int):
    with pytest.raises(ValueError, match="cannot fold 4 values"):
        fold_vectors(np.ones((1, 4), np.float32), values)
