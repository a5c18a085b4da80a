"""Predictors modelled by their published quality, where a paper's model or prompts are not public.

Each takes the true lengths and returns a forecast for each request. The errors are independent of
everything but the length, which errors of a real model are not. Where prompts are known, the
preset's own predictor serves instead.
"""

from collections.abc import Sequence
from math import pi, sin, sqrt

import numpy as np

from services.forecast import UNCAPPED, Floats, Forecast, Ints

Generator = np.random.Generator


def rank_lengths(lengths: Ints, tau: float, rng: Generator) -> Ints:
    """Returns forecasts of a ranker with this Kendall's tau: the true lengths in the order of its
    scores. O(n log n).

    Lengths become normal scores by their rank, ties in random order. A score that has correlation
    r with a normal one has tau = 2/π · asin(r).
    """
    scores = normal_scores(lengths, rng)
    correlation = sin(pi * tau / 2)
    noise = rng.standard_normal(len(lengths))
    noisy = correlation * scores + sqrt(1 - correlation**2) * noise
    return np.sort(lengths)[_invert(np.argsort(noisy, kind="stable"))]


def classify_lengths(
    lengths: Ints, bucket_tokens: int, buckets: int, accuracy: float, rng: Generator
) -> Ints:
    """Returns forecasts of a classifier into buckets of equal width, the last without end: the
    middle of the true bucket with probability `accuracy`, else of one beside it."""
    true = np.minimum((lengths - 1) // bucket_tokens, buckets - 1)
    beside = true + np.where(rng.random(len(lengths)) < 0.5, -1, 1)
    beside = np.where((beside < 0) | (beside >= buckets), 2 * true - beside, beside)
    bucket = np.where(rng.random(len(lengths)) < accuracy, true, beside)
    middle: Ints = bucket * bucket_tokens + (bucket_tokens + 1) // 2
    return middle


def disturb_lengths(lengths: Ints, error: float, rng: Generator) -> Ints:
    """Returns forecasts with this mean relative error, normally distributed: E|ε| = σ · √(2/π)."""
    noise = error * sqrt(pi / 2) * rng.standard_normal(len(lengths))
    disturbed: Ints = np.maximum(1, np.rint(lengths * (1 + noise))).astype(np.int64)
    return disturbed


def spread_lengths(lengths: Ints, tau: float, rng: Generator, points: int = 16) -> list[Forecast]:
    """Returns calibrated forecasts with this Kendall's tau between signals and lengths.

    The length and the predictor's signal are normal by rank with correlation r = sin(π · tau / 2).
    A forecast is the distribution of the length given the signal: normal with mean r · signal and
    variance 1 − r², back in tokens by the quantiles of all lengths. O(n · points).
    """
    from scipy.special import ndtr, ndtri

    correlation = sin(pi * tau / 2)
    spread = sqrt(1 - correlation**2)
    scores = normal_scores(lengths, rng)
    signals = correlation * scores + spread * rng.standard_normal(len(lengths))
    steps = ndtri((np.arange(points) + 0.5) / points)
    levels = ndtr(correlation * signals[:, None] + spread * steps)
    tokens = np.rint(np.quantile(lengths, levels))
    return [_of_equal_points(row) for row in tokens]


def _of_equal_points(tokens: Floats) -> Forecast:
    values, counts = np.unique(np.maximum(tokens, 1), return_counts=True)
    weights = counts / counts.sum()
    return Forecast(tuple(values.tolist()), tuple(weights.tolist()), UNCAPPED, "modelled")


def offset_lengths(lengths: Ints, rmse_tokens: float, rng: Generator) -> Ints:
    """Returns forecasts with a normal error of this root mean square, whatever the length."""
    offset: Ints = np.rint(lengths + rmse_tokens * rng.standard_normal(len(lengths)))
    return np.maximum(1, offset).astype(np.int64)


def normal_scores(values: Ints, rng: Generator) -> Floats:
    """Returns quantiles of the standard normal distribution at the values' ranks, with ties in
    random order."""
    from scipy.special import ndtri

    ranks = _invert(np.lexsort((rng.random(len(values)), values)))
    scores: Floats = ndtri((ranks + 0.5) / len(values))
    return scores


def kendall_tau(forecasts: Sequence[int] | Ints, lengths: Ints) -> float:
    """Returns Kendall's tau-b; 0 if all forecasts are equal."""
    from scipy.stats import kendalltau

    tau = float(kendalltau(forecasts, lengths).statistic)
    return 0.0 if np.isnan(tau) else tau


def _invert(order: Ints) -> Ints:
    """Returns the place of each element in the order."""
    places = np.empty(len(order), np.int64)
    places[order] = np.arange(len(order))
    return places
