"""Length distributions of a batch as a matrix of quantiles, called a spread.

A spread is [n, 64]: row i holds request i's length at LEVELS, ascending (the midpoints of 64 equal
probability intervals). Predictors compute on spreads, vectorised over the batch, and convert to
`Forecast` at the end.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from services.forecast import MAX_POINTS, Forecast

Floats = NDArray[np.float64]

_MAX_TOKENS = 2.0**20  # maximum tokens of a forecast
LEVELS: Floats = (np.arange(MAX_POINTS) + 0.5) / MAX_POINTS
_MAX_EXTRAPOLATION = float(np.log(4))  # beyond the ends, a factor of four
_MIN_SLOPE = 1e-3  # log length per point beyond the ends


def from_samples(samples: Floats, weights: Floats | None = None) -> Floats:
    """Quantiles of weighted samples [n, m]. O(n · m log m)."""
    if weights is None:
        return np.quantile(samples, LEVELS, axis=1, method="hazen").T
    order = np.argsort(samples, axis=1)
    ascending = np.take_along_axis(samples, order, 1)
    mass = np.cumsum(np.take_along_axis(weights, order, 1), axis=1)
    mass /= mass[:, -1:]
    # One search for all rows: the masses of row i are in (i, i + 1].
    rows = np.arange(len(samples))[:, None]
    at = np.searchsorted((mass + rows).ravel(), (LEVELS + rows).ravel() - 1e-9)
    return ascending.ravel()[np.minimum(at, samples.size - 1)].reshape(len(samples), -1)


def mean(spread: Floats) -> Floats:
    return np.asarray(spread.mean(axis=1), float)


def average(spreads: Sequence[Floats], weights: Floats) -> Floats:
    """Weighted geometric mean of each quantile; weights [n, members], rows sum to 1.

    Averaging quantiles keeps the members' sharpness; averaging densities would widen them
    (Lichtendahl, Grushka-Cockayne and Winkler, Management Science 2013).
    """
    logs = np.log(np.stack(spreads, axis=2))
    return np.asarray(np.exp(np.einsum("nqm,nm->nq", logs, weights)))


def quantile_levels(spread: Floats, lengths: Floats) -> Floats:
    """Level of each row's true length: uniform in (0, 1) for calibrated forecasts, below 0 or above
    1 beyond the ends. The inverse of `recalibrated`; the middle level when points are equal."""
    logs, true = np.log(spread), np.log(np.maximum(lengths, 1))[:, None]
    below, upto = (logs < true).sum(axis=1), (logs <= true).sum(axis=1)
    low = np.clip(below - 1, 0, MAX_POINTS - 2)
    rows = np.arange(len(logs))
    here, step = logs[rows, low], logs[rows, low + 1] - logs[rows, low]
    down, up = _end_slopes(logs)
    inside = low + np.clip((true[:, 0] - here) / np.maximum(step, 1e-9), 0, 1)
    position = np.where(upto > below, (below + upto - 1) / 2, inside)
    outside = np.minimum(true - logs[:, [0]], 0) / down + np.maximum(true - logs[:, [-1]], 0) / up
    return np.asarray((position + outside[:, 0] + 0.5) / MAX_POINTS)


def recalibrated(spread: Floats, levels: Floats) -> Floats:
    """Reads the spread at other levels: quantile q becomes quantile levels[q] (Kuleshov, Fenner and
    Ermon, ICML 2018).

      levels: [64] for all rows or [n, 64]. Beyond the ends, log length continues with the
        slope of the last eighth.
    """
    logs = np.log(spread)
    position = np.broadcast_to(levels, spread.shape) * MAX_POINTS - 0.5
    low = np.clip(np.floor(position).astype(int), 0, MAX_POINTS - 2)
    here = np.take_along_axis(logs, low, 1)
    step = np.take_along_axis(logs, low + 1, 1) - here
    inside = here + np.clip(position - low, 0, 1) * step
    down, up = _end_slopes(logs)
    outside = np.minimum(position, 0) * down + np.maximum(position - MAX_POINTS + 1, 0) * up
    return np.asarray(np.exp(inside + np.clip(outside, -_MAX_EXTRAPOLATION, _MAX_EXTRAPOLATION)))


def _end_slopes(logs: Floats) -> tuple[Floats, Floats]:
    """Mean step of log length over the first and the last eighth of the points, [n, 1] each."""
    eighth = MAX_POINTS // 8
    down = (logs[:, [eighth]] - logs[:, [0]]) / eighth
    up = (logs[:, [-1]] - logs[:, [-1 - eighth]]) / eighth
    return np.maximum(down, _MIN_SLOPE), np.maximum(up, _MIN_SLOPE)


def forecasts(spread: Floats, source: str, version: int) -> list[Forecast]:
    """Converts rows to forecasts rounded to 0.1 tokens; equal points are merged, and lengths are
    capped at 2^20 tokens."""
    sound = np.round(np.clip(spread, 1, _MAX_TOKENS), 1)
    return [_forecast(row, source, version) for row in sound]


def _forecast(row: Floats, source: str, version: int) -> Forecast:
    starts = np.flatnonzero(np.diff(row, prepend=0.0))
    counts = np.diff(starts, append=MAX_POINTS)
    points, weights = row[starts].tolist(), (counts / MAX_POINTS).tolist()
    return Forecast(tuple(points), tuple(weights), int(np.ceil(points[-1])), source, version)
