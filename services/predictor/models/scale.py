"""Maps scores to length distributions: score → rank among known requests → their lengths."""

from dataclasses import dataclass

import numpy as np

from services.predictor.models.spread import LEVELS, Floats

KNOTS = 48
_MIN_REQUESTS_PER_KNOT = 12
_NEIGHBOURS = (30, 600)  # bounds of the requests per quantile curve
_MAX_TILT = 0.1  # of log length, in both directions
_SLOPE = 0.01  # log length per standard deviation of the score: keeps the order when lengths tie


@dataclass(frozen=True)
class Scale:
    """Quantile curves that increase with the score, so that forecasts keep the order of scores.

    knots: [k] ascending scores; logs: [k, 64] log lengths at LEVELS.
    """

    knots: Floats
    logs: Floats

    @staticmethod
    def fit(scores: Floats, lengths: Floats) -> "Scale":
        """Fits to out-of-fold scores and their true lengths.

        A knot takes the lengths of the requests nearest in rank. Curves are made monotone by the
        mean of the running maximum from below and the running minimum from above.
        """
        order = np.argsort(scores, kind="stable")
        ranked, logs = scores[order], np.log(np.maximum(lengths[order], 1))
        n = len(ranked)
        k = int(np.clip(n // _MIN_REQUESTS_PER_KNOT, 2, KNOTS))
        half = int(np.clip(n // (2 * k) * 2, *_NEIGHBOURS)) // 2 + 1
        middles = np.linspace(0, n - 1, k).round().astype(int)
        windows = [slice(max(0, m - half), m + half + 1) for m in middles]
        rows = np.stack([np.quantile(logs[w], LEVELS, method="hazen") for w in windows])
        knots = np.array([ranked[w].mean() for w in windows])
        rising = np.maximum.accumulate(rows, axis=0)
        falling = np.minimum.accumulate(rows[::-1], axis=0)[::-1]
        deviation = max(float(ranked.std()), 1e-9)
        tilt = _tilt((knots - knots.mean()) / deviation)
        knots = knots + 1e-9 * deviation * np.arange(k)
        return Scale(knots, (rising + falling) / 2 + tilt[:, None])

    def spread(self, scores: Floats) -> Floats:
        """[n] scores → [n, 64]; linear between knots, with the tilt alone beyond the ends."""
        right = np.clip(np.searchsorted(self.knots, scores), 1, len(self.knots) - 1)
        width = self.knots[right] - self.knots[right - 1]
        share = np.clip((scores - self.knots[right - 1]) / width, 0, 1)[:, None]
        logs = self.logs[right - 1] * (1 - share) + self.logs[right] * share
        beyond = scores - np.clip(scores, self.knots[0], self.knots[-1])
        deviation = max(float(self.knots.std()), 1e-9)
        return np.exp(logs + _tilt(beyond / deviation)[:, None])


def _tilt(deviations: Floats) -> Floats:
    """Returns a bounded tilt, because near-constant scores have a tiny deviation."""
    return np.clip(_SLOPE * deviations, -_MAX_TILT, _MAX_TILT)
