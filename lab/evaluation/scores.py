"""Accuracy of forecasts against true lengths."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.forecast import MAX_POINTS, Forecast
from services.predictor.learning.scorecard import SCORE_LEVELS, pinball_loss, tau_b
from services.predictor.models.spread import Floats

BUCKETS = 10


@dataclass(frozen=True, slots=True)
class Scores:
    """Accuracy of n forecasts, lengths in tokens; the point forecast is the distribution's mean.

    tau: Kendall's tau-b of means and lengths; NaN when either is constant.
    mean_relative_error: mean of |mean − length| / length.
    bucket_accuracy: share of means in their length's bucket. [0, longest length] is divided into
      ten equal buckets of `bucket_tokens`; longer means are in the last. ALISE (Zhao et al., 2024,
      Table 2) uses "evenly divided bins" of an unstated number; ten is the number of classes of
      Learning to Rank's baseline.
    pinball: quantile loss averaged over SCORE_LEVELS.
    crps: mean continuous ranked probability score, exact for weighted points.
    coverage_50, coverage_90: share of lengths in the central interval, ends included.
    reached: share of lengths ≤ the quantile, per level of SCORE_LEVELS.
    """

    n: int
    tau: float
    rmse: float
    mae: float
    mean_relative_error: float
    bucket_accuracy: float
    bucket_tokens: float
    pinball: float
    crps: float
    coverage_50: float
    coverage_90: float
    reached: tuple[float, ...]


def score(forecasts: Sequence[Forecast], lengths: Sequence[int]) -> Scores:
    """Scores at least one forecast. Raises ValueError unless each forecast has a length.

    O(n · (64 + log n)) time, two arrays of n · 64 numbers.
    """
    if not forecasts or len(forecasts) != len(lengths):
        raise ValueError(f"{len(forecasts)} forecasts for {len(lengths)} lengths")
    true = np.asarray(lengths, np.float64)
    points, mass = _padded(forecasts)
    means = np.array([forecast.mean() for forecast in forecasts])
    quantiles = np.stack([_quantile(points, mass, level) for level in SCORE_LEVELS], axis=1)
    error = means - true
    width = true.max() / BUCKETS
    return Scores(
        n=len(true),
        tau=tau_b(means, true),
        rmse=float(np.sqrt(np.mean(error**2))),
        mae=float(np.mean(np.abs(error))),
        mean_relative_error=float(np.mean(np.abs(error) / true)),
        bucket_accuracy=float(np.mean(_bucket(means, width) == _bucket(true, width))),
        bucket_tokens=float(width),
        pinball=pinball_loss(quantiles, true[:, None]),
        crps=_crps(points, mass, true),
        coverage_50=_coverage(points, mass, true, 0.5),
        coverage_90=_coverage(points, mass, true, 0.9),
        reached=tuple(float(share) for share in np.mean(true[:, None] <= quantiles, axis=0)),
    )


def _padded(forecasts: Sequence[Forecast]) -> tuple[Floats, Floats]:
    """Returns points [n, 64] and P(L ≤ point). The last point is repeated with mass 1."""
    points = np.empty((len(forecasts), MAX_POINTS))
    mass = np.ones_like(points)
    for i, forecast in enumerate(forecasts):
        size = len(forecast.points)
        points[i, :size] = forecast.points
        points[i, size:] = forecast.points[-1]
        mass[i, : size - 1] = np.cumsum(forecast.weights)[:-1]
    return points, mass


def _quantile(points: Floats, mass: Floats, level: float) -> Floats:
    """Returns Forecast.quantile(level) of each row."""
    column = np.sum(mass < level - 1e-12, axis=1)
    quantile: Floats = np.take_along_axis(points, column[:, None], axis=1)[:, 0]
    return quantile


def _bucket(tokens: Floats, width: float) -> NDArray[np.int64]:
    return np.minimum(np.floor(tokens / width), BUCKETS - 1).astype(np.int64)


def _crps(points: Floats, mass: Floats, true: Floats) -> float:
    """E|X − y| − E|X − X'| / 2; the second term is ∫ F (1 − F), a sum of steps."""
    weights = np.diff(mass, axis=1, prepend=0)
    apart = np.sum(weights * np.abs(points - true[:, None]), axis=1)
    spread = np.sum(mass[:, :-1] * (1 - mass[:, :-1]) * np.diff(points, axis=1), axis=1)
    return float(np.mean(apart - spread))


def _coverage(points: Floats, mass: Floats, true: Floats, share: float) -> float:
    low = _quantile(points, mass, (1 - share) / 2)
    high = _quantile(points, mass, (1 + share) / 2)
    return float(np.mean((low <= true) & (true <= high)))
