"""From a score to a length distribution: score → rank among known requests → their lengths."""

from dataclasses import dataclass

import numpy as np

from services.predictor.models.spread import LEVELS, Floats

KNOTS = 48
_LEAST_KNOT = 12  # known requests a knot
_NEIGHBOURS = (30, 600)
_STEEPEST = 0.1  # of log length, however far beyond
_SLOPE = 0.01  # of log length a standard deviation of the score: keeps the order where lengths tie


@dataclass(frozen=True)
class Scale:
    """Quantile curves over the score, each rising with it, so that the order is the score's.

    knots: [k] scores, ascending; logs: [k, 64] log lengths at LEVELS.
    """

    knots: Floats
    logs: Floats

    @staticmethod
    def fit(scores: Floats, lengths: Floats) -> "Scale":
        """From scores given to requests unseen by what scored them, and their true lengths.

        A knot's lengths are those of the requests nearest to it in rank. Curves are made monotone
        by the mean of the running maximum from below and minimum from above.
        """
        order = np.argsort(scores, kind="stable")
        ranked, logs = scores[order], np.log(np.maximum(lengths[order], 1))
        n = len(ranked)
        k = int(np.clip(n // _LEAST_KNOT, 2, KNOTS))
        half = int(np.clip(n // (2 * k) * 2, *_NEIGHBOURS)) // 2 + 1
        middles = np.linspace(0, n - 1, k).round().astype(int)
        windows = [slice(max(0, m - half), m + half + 1) for m in middles]
        rows = np.stack([np.quantile(logs[w], LEVELS, method="hazen") for w in windows])
        knots = np.array([ranked[w].mean() for w in windows])
        rising = np.maximum.accumulate(rows, axis=0)
        falling = np.minimum.accumulate(rows[::-1], axis=0)[::-1]
        deviation = max(float(ranked.std()), 1e-9)
        tilt = _sloped((knots - knots.mean()) / deviation)
        knots = knots + 1e-9 * deviation * np.arange(k)
        return Scale(knots, (rising + falling) / 2 + tilt[:, None])

    def spread(self, scores: Floats) -> Floats:
        """[n] scores → [n, 64]; linear between knots, at the slope alone beyond the ends."""
        right = np.clip(np.searchsorted(self.knots, scores), 1, len(self.knots) - 1)
        width = self.knots[right] - self.knots[right - 1]
        share = np.clip((scores - self.knots[right - 1]) / width, 0, 1)[:, None]
        logs = self.logs[right - 1] * (1 - share) + self.logs[right] * share
        beyond = scores - np.clip(scores, self.knots[0], self.knots[-1])
        deviation = max(float(self.knots.std()), 1e-9)
        return np.exp(logs + _sloped(beyond / deviation)[:, None])


def _sloped(deviations: Floats) -> Floats:
    """Bounded: scores that hardly differ have a deviation near nothing to be measured in."""
    return np.clip(_SLOPE * deviations, -_STEEPEST, _STEEPEST)
