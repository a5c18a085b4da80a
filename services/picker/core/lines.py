"""Speeds measured from requests: a line through recent samples. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

DECAY = 0.98  # weight of a sample after the next one: about 50 samples count
# An engine is at most so many times slower than the line that its fit starts from. Rounding can
# leave that line a base of next to 0, which is no scale.
MAX_RATIO = 1e4
MIN_LEVEL = 1e-12


@dataclass(frozen=True, slots=True)
class Line:
    """base + slope · x, both at least 0."""

    base: float
    slope: float

    def at(self, x: float) -> float:
        return self.base + self.slope * x


def mean_line(lines: Sequence[Line], default: Line) -> Line:
    """The mean of the lines, `default` without any."""
    count = len(lines)
    if not count:
        return default
    return Line(sum(line.base for line in lines) / count, sum(line.slope for line in lines) / count)


class LineFit:
    """Least squares with exponentially decaying weights.

    While the samples have nearly one x, the slope is unknown: it then has the ratio to the mean
    that the `like` line has, as if `spread` were added to the sum of squares of x.
    """

    def __init__(self, spread: float):
        self._spread = spread
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def __bool__(self) -> bool:
        return self._weight > 0

    def add(self, x: float, y: float, weight: float = 1.0) -> None:
        """Adds a sample with a weight above 0. O(1)."""
        self._weight = DECAY * self._weight + weight
        self._x = DECAY * self._x + weight * x
        self._y = DECAY * self._y + weight * y
        self._xx = DECAY * self._xx + weight * x * x
        self._xy = DECAY * self._xy + weight * x * y

    def line(self, like: Line, like_samples: float = 0.0) -> Line:
        """The fitted line; `like` without samples, else it counts as so many of them."""
        if not self:
            return like
        x, y = self._x / self._weight, self._y / self._weight
        spread = max(0.0, self._xx - self._weight * x * x)
        common = self._xy - self._weight * x * y
        y = (self._y + like_samples * like.at(x)) / (self._weight + like_samples)
        prior = like.slope * min(MAX_RATIO, y / max(like.at(x), MIN_LEVEL))
        slope = (common + self._spread * prior) / (spread + self._spread)
        slope = max(0.0, min(slope, y / x if x > 0 else prior))
        return Line(max(0.0, y - slope * x), slope)
