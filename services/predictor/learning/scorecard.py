"""Accuracy of recent forecasts."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from math import nan

import numpy as np

from services.forecast import Forecast
from services.predictor.models.scoring import LEVELS, tau_b
from services.predictor.models.spread import Floats

WINDOW = 1_000  # outcomes: estimates 90 % coverage within 2 points
RECENT = 250  # latest outcomes, compared with the rest of the window for drift


@dataclass(frozen=True, slots=True)
class JudgedForecast:
    """One forecast scored by its outcome.

    level: P(L < tokens) + P(L = tokens) / 2, uniform in [0, 1] when forecasts are calibrated.
    pinball_tokens: quantile loss averaged over LEVELS.
    """

    mean: float
    tokens: int
    level: float
    inside_50: bool
    inside_90: bool
    pinball_tokens: float


@dataclass(frozen=True, slots=True)
class ScorecardSummary:
    """Scores of `count` outcomes; NaN when there are too few.

    tau: Kendall's tau-b of means and lengths.
    coverage_50, coverage_90: share of lengths in the central interval, ends included.
    drift: Kolmogorov-Smirnov distance in [0, 1] between the levels of the last 250 outcomes and of
      those before. It measures a change in calibration, not a change in lengths.
    """

    count: int
    tau: float
    coverage_50: float
    coverage_90: float
    pinball_tokens: float
    drift: float


def judge(forecast: Forecast, tokens: int, max_tokens: int) -> JudgedForecast:
    """Scores the forecast truncated at the request's max_tokens."""
    cut = forecast.truncated(max(tokens, max_tokens, 1))
    points, mass = np.array(cut.points), np.cumsum(cut.weights)
    last = len(points) - 1
    at = points[np.minimum(np.searchsorted(mass, LEVELS - 1e-12), last)]
    under = tokens - at
    below, upto = (
        mass[i - 1] if i else 0.0 for i in np.searchsorted(points, [tokens, tokens + 1e-9])
    )
    return JudgedForecast(
        mean=cut.mean(),
        tokens=tokens,
        level=float(below + upto) / 2,
        inside_50=cut.quantile(0.25) <= tokens <= cut.quantile(0.75),
        inside_90=bool(at[0] <= tokens <= at[-1]),
        pinball_tokens=float(np.maximum(LEVELS * under, (LEVELS - 1) * under).mean()),
    )


class Scorecard:
    """The last WINDOW scored forecasts."""

    def __init__(self) -> None:
        self._judged: deque[JudgedForecast] = deque(maxlen=WINDOW)

    def add(self, judged: Iterable[JudgedForecast]) -> None:
        self._judged.extend(judged)

    def scores(self) -> ScorecardSummary:
        """Summarises the window in a few milliseconds."""
        if not self._judged:
            return ScorecardSummary(0, nan, nan, nan, nan, nan)
        means, tokens, levels, inside_50, inside_90, pinball = np.array(
            [
                (j.mean, j.tokens, j.level, j.inside_50, j.inside_90, j.pinball_tokens)
                for j in self._judged
            ],
            float,
        ).T
        return ScorecardSummary(
            count=len(self._judged),
            tau=tau_b(means, tokens),
            coverage_50=float(inside_50.mean()),
            coverage_90=float(inside_90.mean()),
            pinball_tokens=float(pinball.mean()),
            drift=distance(levels[:-RECENT], levels[-RECENT:]),
        )


def distance(a: Floats, b: Floats) -> float:
    """Kolmogorov-Smirnov distance of two samples; NaN when one is too small."""
    if not len(a) or len(b) < RECENT:
        return nan
    at = np.concatenate([a, b])
    share_a = np.searchsorted(np.sort(a), at, side="right") / len(a)
    share_b = np.searchsorted(np.sort(b), at, side="right") / len(b)
    return float(np.abs(share_a - share_b).max())
