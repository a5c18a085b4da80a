"""Forecast: one request's output length as a distribution, and its arithmetic.

Everything conditions on progress: given `g` generated tokens, the total length L is distributed as
L | L > g. Past the last point the remaining length is exponential with that point as its mean: an
answer that outlives its forecast is expected to be as long again, as ALISE's doubling has it (Zhao
and Wang, 2024, §3.1). No result exceeds `max_tokens` or is below `g`: a request past its cap has
nothing left.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from math import exp, expm1, inf, log1p

import numpy as np
from numpy.typing import NDArray

MAX_POINTS = 64
TAIL_POINTS = 16  # of an exponential distribution that is made one of points
MAX_FORECAST_TOKENS = 2**24 - 1  # longer than any context; keeps a table's arithmetic exact
UNCAPPED = MAX_FORECAST_TOKENS  # max_tokens of a shared forecast

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Forecast:
    """Weighted support points (ascending, at most 64) over total output tokens.

    `shared_key` names the population of the forecast: all requests with that key share it, and a
    refresh replaces it for all. Empty for a forecast made from the prompt. A shared forecast is
    UNCAPPED, because each request has its own cap: mass on UNCAPPED stands for the reader's
    `max_tokens`, which the reader supplies (`most`, `truncated`, a table's caps).

    Raises ValueError if points are unordered, not positive, too many, or do not match the weights.
    """

    points: tuple[float, ...]
    weights: tuple[float, ...]
    max_tokens: int
    source: str = "max"
    version: int = 0
    shared_key: str = ""

    def __post_init__(self) -> None:
        if not 1 <= len(self.points) <= MAX_POINTS or len(self.points) != len(self.weights):
            raise ValueError(f"a forecast has 1 to {MAX_POINTS} points and a weight for each")
        if any(b <= a for a, b in zip(self.points, self.points[1:], strict=False)):
            raise ValueError("forecast points must ascend")
        if max(self.max_tokens, self.points[-1]) > MAX_FORECAST_TOKENS:
            raise ValueError(f"a forecast is of at most {MAX_FORECAST_TOKENS} tokens")
        if not self.points[0] > 0 or not self.points[-1] <= self.max_tokens:
            raise ValueError("forecast points must lie in (0, max_tokens]")
        if not min(self.weights) > 0 or not abs(sum(self.weights) - 1) < 1e-6:
            raise ValueError("forecast weights must be positive and sum to 1")

    def _mean_beyond(self, generated: int, most: int) -> float:
        """E[min(L, most) | L > generated] past the last point."""
        room, tail = most - generated, self.points[-1]
        return generated - tail * expm1(-room / tail) if room > 0 else float(max(most, generated))

    @cached_property
    def _cdf(self) -> tuple[float, ...]:
        return tuple(accumulate(self.weights))

    @cached_property
    def _tail_means(self) -> tuple[float, ...]:
        """E[L | L ≥ point] per point, clipped against rounding errors."""
        backwards = list(zip(self.points[::-1], self.weights[::-1], strict=True))
        moments = accumulate(point * weight for point, weight in backwards)
        masses = accumulate(weight for _, weight in backwards)
        means = [m / w for m, w in zip(moments, masses, strict=True)][::-1]
        return tuple(
            min(max(m, p), self.points[-1]) for m, p in zip(means, self.points, strict=True)
        )

    def _mass_to(self, tokens: float) -> float:
        """P(L ≤ tokens)."""
        i = bisect_right(self.points, tokens)
        return self._cdf[i - 1] if 0 < i < len(self.points) else float(i > 0)

    def survival(self, tokens: float, generated: int = 0) -> float:
        """P(L > tokens | L > generated): 1 up to `generated`, falling, 0 from max_tokens on."""
        if tokens >= self.max_tokens:
            return 0.0
        if tokens <= generated:
            return 1.0
        if generated >= self.points[-1]:
            return exp((generated - tokens) / self.points[-1])
        beyond = 1 - self._mass_to(generated)
        return (1 - self._mass_to(tokens)) / beyond

    def quantile(self, q: float, generated: int = 0) -> float:
        """Smallest length l with P(L ≤ l | L > generated) ≥ q; q in [0, 1]."""
        first = bisect_right(self.points, generated)
        if first == len(self.points):
            longer = max(1.0, -self.points[-1] * log1p(-q)) if q < 1 else inf
            return float(max(min(generated + longer, self.max_tokens), generated))
        below = self._mass_to(generated)
        target = below + q * (1 - below)
        for point, mass in zip(self.points[first:], self._cdf[first:], strict=True):
            if mass >= target - 1e-12:
                return point
        return self.points[-1]

    def mean(self, generated: int = 0, most: int = UNCAPPED) -> float:
        """E[min(L, most) | L > generated]; `generated` where that is past both caps."""
        most = min(most, self.max_tokens)
        first, end = (bisect_right(self.points, tokens) for tokens in (generated, most))
        if first == len(self.points):
            return self._mean_beyond(generated, most)
        if first >= end:
            return float(max(most, generated))
        if end == len(self.points):
            return self._tail_means[first]
        inside = zip(self.points[first:end], self.weights[first:end], strict=True)
        beyond = 1 - self._cdf[end - 1]
        left = beyond + sum(self.weights[first:end])
        total = sum(point * weight for point, weight in inside) + most * beyond
        return min(max(total / left, self.points[first]), most)

    def mean_remaining(self, generated: int = 0, most: int = UNCAPPED) -> float:
        """E[min(L, most) − generated | L > generated]; positive below both caps, 0 from there."""
        return self.mean(generated, most) - generated

    def sample(self, rng: np.random.Generator, generated: int = 0) -> float:
        """One draw of L | L > generated, reproducible by the generator; `max_tokens` if nothing is
        longer, as in Past-Future (Gong et al., ASPLOS 2025, §3.2)."""
        share = 1 - rng.random()
        if generated >= self.points[-1]:
            return float(max(self.max_tokens, generated))
        return self.quantile(share, generated)

    def at_least(self, tokens: int) -> "Forecast":
        """The forecast of L | L ≥ tokens, or of `max_tokens` if `tokens` are more."""
        tokens = min(tokens, self.max_tokens)
        if tokens <= self.points[0]:
            return self
        first = bisect_left(self.points, tokens)
        if first < len(self.points):
            mass = sum(self.weights[first:])
            weights = tuple(weight / mass for weight in self.weights[first:])
            return replace(self, points=self.points[first:], weights=weights)
        shares = ((part + 0.5) / TAIL_POINTS for part in range(TAIL_POINTS))
        lengths = [max(tokens, self.quantile(share, tokens - 1)) for share in shares]
        return from_lengths(lengths, self.max_tokens, self.source, self.version, self.shared_key)

    def truncated(self, max_tokens: int) -> "Forecast":
        """The forecast of min(L, max_tokens)."""
        if max_tokens == self.max_tokens:
            return self
        last: Forecast | None = self.__dict__.get("_last_truncated")
        if last is None or last.max_tokens != max_tokens:  # many requests have equal caps
            last = self.__dict__["_last_truncated"] = self._truncate(max_tokens)
        return last

    def _truncate(self, max_tokens: int) -> "Forecast":
        if self.points[-1] <= max_tokens:
            return replace(self, max_tokens=max_tokens)
        kept = bisect_right(self.points, max_tokens - 1e-9)
        points = (*self.points[:kept], float(max_tokens))
        weights = (*self.weights[:kept], sum(self.weights[kept:]))
        return replace(self, points=points, weights=weights, max_tokens=max_tokens)


def certain(tokens: int, source: str = "max") -> Forecast:
    """A forecast with all mass on one length."""
    return Forecast((float(tokens),), (1.0,), tokens, source)


def from_lengths(
    lengths: Sequence[float], max_tokens: int, source: str, version: int = 0, shared_key: str = ""
) -> Forecast:
    """The empirical distribution of `lengths`, compressed as in `from_masses`."""
    values, counts = np.unique(
        np.clip(np.asarray(lengths, float), 1, max_tokens), return_counts=True
    )
    plain = Forecast((float(max_tokens),), (1.0,), max_tokens, source, version, shared_key)
    return from_masses(values, counts / counts.sum(), 0.0, plain)


def from_masses(values: Floats, masses: Floats, longest: float, like: Forecast) -> Forecast:
    """A forecast of ascending lengths with positive masses, and the mass `longest` on `max_tokens`;
    other fields as in `like`. Exact up to 64 points.

    Beyond that, neighbours are merged into groups of nearly equal mass, each at its mean. The top
    eighth of the mass gets a quarter of the points, because conditioning on progress needs the
    tail. Mass on `max_tokens` is not merged.
    """
    room = MAX_POINTS - (longest > 0)
    if len(values) > room:
        values, masses = _merge(values, masses, room)
    if longest > 0:
        values, masses = np.append(values, like.max_tokens), np.append(masses, longest)
    points = tuple(float(v) for v in values)
    return replace(like, points=points, weights=tuple(float(m) for m in masses))


def _merge(values: Floats, weights: Floats, most: int) -> tuple[Floats, Floats]:
    """At most this many groups of equal total mass."""
    tail, total = MAX_POINTS // 4, weights.sum()
    body_edges = np.linspace(0, 0.875, most - tail + 1)[1:]
    edges = np.concatenate([body_edges, np.linspace(0.875, 1, tail + 1)[1:-1]])
    middle = (np.cumsum(weights) - weights / 2) / total
    group = np.searchsorted(edges, middle)
    mass = np.bincount(group, weights, most)
    mean = np.bincount(group, weights * values, most)
    used = mass > 0
    points, place = np.unique(np.round(mean[used] / mass[used], 3), return_inverse=True)
    joined = np.bincount(place, mass[used])
    return points, joined * (total / joined.sum())
