"""Modelled predictors have the quality that is asked of them."""

import numpy as np
import pytest

from simulator.papers.modelled import (
    classify_lengths,
    disturb_lengths,
    kendall_tau,
    normal_scores,
    offset_lengths,
    rank_lengths,
    spread_lengths,
)


def lengths(count: int = 4_000) -> np.ndarray:
    return np.random.default_rng(5).permutation(np.arange(1, count + 1))


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def test_kendall_tau_of_three_values_is_worked_by_hand():
    # Of three pairs, two agree: (2 - 1) / 3.
    assert kendall_tau([1, 3, 2], np.array([10, 20, 30])) == pytest.approx(1 / 3)
    assert kendall_tau([7, 7, 7], np.array([10, 20, 30])) == 0.0


def test_normal_scores_are_quantiles_at_ranks():
    scores = normal_scores(np.array([50, 5, 500]), rng())
    assert scores == pytest.approx([0.0, -0.9674, 0.9674], abs=1e-4)  # of 1/2, 1/6 and 5/6


@pytest.mark.parametrize("tau", [0.0, 0.17, 0.54, 0.62, 0.84])
def test_ranker_has_the_tau_asked(tau):
    # The standard error of tau for 4,000 independent pairs is below 0.0106.
    assert kendall_tau(rank_lengths(lengths(), tau, rng()), lengths()) == pytest.approx(
        tau, abs=0.032
    )


def test_ranker_permutes_lengths_and_is_perfect_at_tau_1():
    assert np.array_equal(np.sort(rank_lengths(lengths(), 0.5, rng())), np.sort(lengths()))
    assert np.array_equal(rank_lengths(lengths(), 1.0, rng()), lengths())


def test_classifier_answers_the_middle_of_the_bucket():
    found = classify_lengths(np.array([1, 819, 820, 8_190, 9_000]), 819, 10, 1.0, rng())
    assert found.tolist() == [410, 410, 819 + 410, 9 * 819 + 410, 9 * 819 + 410]


@pytest.mark.parametrize("accuracy", [0.968, 0.5])
def test_classifier_has_the_accuracy_asked_and_misses_by_one_bucket(accuracy):
    found = classify_lengths(lengths(), 400, 10, accuracy, rng()) // 400
    missed = found - (lengths() - 1) // 400
    # Three standard errors of a share of 4,000 are at most 0.024.
    assert np.mean(missed == 0) == pytest.approx(accuracy, abs=0.024)
    assert set(missed.tolist()) == {-1, 0, 1}
    assert found.min() == 0 and found.max() == 9


@pytest.mark.parametrize("error", [0.034, 0.092])
def test_disturbed_lengths_have_the_mean_error_asked(error):
    true = np.full(4_000, 100_000)
    found = np.abs(disturb_lengths(true, error, rng()) / true - 1).mean()
    # The deviation of |ε| is 0.756 of its mean; three standard errors.
    assert found == pytest.approx(error, rel=3 * 0.756 / 4_000**0.5)


def test_forecasts_are_at_least_one_token():
    assert disturb_lengths(np.ones(1_000, np.int64), 3.0, rng()).min() == 1


def test_offset_forecasts_have_this_error_whatever_the_length():
    true = lengths() + 100
    errors = offset_lengths(true, 15.6, rng()) - true
    assert np.sqrt((errors**2).mean()) == pytest.approx(15.6, rel=0.05)
    short, long = errors[true < 1_000], errors[true > 3_000]
    assert short.std() == pytest.approx(long.std(), rel=0.1)
    assert offset_lengths(np.ones(100, np.int64), 15.6, rng()).min() == 1


def test_spread_forecasts_are_calibrated_and_as_good_as_asked() -> None:
    """Each half of a forecast has half of the answers; the means rank as the signals do, which the
    requested tau describes up to the error of 4,000 draws."""
    drawn = np.random.default_rng(3)
    answers = np.ceil(drawn.lognormal(5, 1, 4_000)).astype(np.int64)
    for tau in (0.2, 0.6):
        forecasts = spread_lengths(answers, tau, drawn)
        pairs = zip(forecasts, answers.tolist(), strict=True)
        below = [length <= forecast.quantile(0.5) for forecast, length in pairs]
        assert abs(np.mean(below) - 0.5) < 0.05
        means = [round(1_000 * each.mean()) for each in forecasts]
        assert abs(kendall_tau(means, answers) - tau) < 0.04
    assert [each.mean() for each in spread_lengths(np.full(5, 7), 0.5, drawn)] == [7.0] * 5
