"""Forecasts of many requests as rows of arrays: conditioned, sampled and queried together."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from services.forecast import MAX_POINTS, Floats, Forecast, Ints

_Float = TypeVar("_Float", np.float32, np.float64)


class ForecastTable:
    """Forecasts interned as rows of arrays, to condition and sample whole batches at once.

    A row holds one forecast while it is in use (`intern` and `release` count references). `which`
    names rows; `generated` and `caps` (each request's max_tokens) are parallel to it. Every lookup
    is one branchless binary search over 64 points for all rows together, six steps of a few numpy
    calls, without a Python loop. A forecast is tabulated once.
    """

    def __init__(self, rows: int = 64):
        self._points = np.full((rows, MAX_POINTS), np.inf)
        # The first whole token from which each point is reached: exact, and half the size to
        # search.
        self._reached = np.full((rows, MAX_POINTS), np.inf, np.float32)
        self._longest = np.full(rows, _ENDLESS)
        self._weights = np.zeros((rows, MAX_POINTS))
        self._cdf = np.full((rows, MAX_POINTS), _NEVER)
        # Mass and moment from each point on; zero after the last.
        self._mass = np.zeros((rows, MAX_POINTS + 1))
        self._moment = np.zeros((rows, MAX_POINTS + 1))
        # By row, how many points are reached by the tokens that were last asked for.
        self._asked = np.full(rows, _NEVER_ASKED)
        self._counted = np.zeros(rows, np.int64)
        self._uses = [0] * rows
        self._editions = np.zeros(rows, np.int64)
        self._free = list(range(rows))[::-1]
        # Rows by shared_key, and by the least tokens of their requests.
        self._shared: dict[str, dict[int, int]] = {}
        self._names: dict[int, tuple[str, int]] = {}

    def __getstate__(self) -> dict[str, object]:
        """Without the counts of earlier questions, which change no answer."""
        never = np.full(self.rows, _NEVER_ASKED)
        return {**self.__dict__, "_asked": never, "_counted": np.zeros_like(never)}

    def __len__(self) -> int:
        """Rows in use."""
        return len(self._uses) - len(self._free)

    @property
    def rows(self) -> int:
        """All rows, used or free."""
        return len(self._uses)

    def edition(self, row: int) -> int:
        """How often a row was written, for mirrors of the table."""
        return int(self._editions[row])

    def editions(self, which: Ints) -> Ints:
        return self._editions[which]

    def intern(self, forecast: Forecast, least: int = 0) -> int:
        """The row of this forecast for requests with at least `least` tokens. A population shared
        by many of them has one row, which `renew` rewrites for all."""
        key = forecast.shared_key
        row = self._shared.get(key, {}).get(least) if key else None
        if row is None:
            row = self._take()
            self._write(row, forecast, least)
            if key:
                self._shared.setdefault(key, {})[least] = row
                self._names[row] = key, least
        self._uses[row] += 1
        return row

    def renew(self, forecast: Forecast) -> list[int]:
        """Replaces a population's forecast; returns its rows."""
        rows = self._shared.get(forecast.shared_key, {})
        for least, row in rows.items():
            self._write(row, forecast, least)
        return list(rows.values())

    def _write(self, row: int, forecast: Forecast, least: int) -> None:
        bounded = forecast.at_least(least)
        self.put(row, bounded.points, bounded.weights)

    def release(self, row: int) -> None:
        """Drops a reference; the last one frees the row."""
        self._uses[row] -= 1
        if not self._uses[row]:
            if row in self._names:
                key, least = self._names.pop(row)
                del self._shared[key][least]
                if not self._shared[key]:
                    del self._shared[key]
            self._free.append(row)

    def put(
        self, row: int, points: Sequence[float] | Floats, weights: Sequence[float] | Floats
    ) -> None:
        """Writes a row, as a mirror of another table does; `intern` does so itself."""
        while row >= len(self._uses):
            self._grow()
        self._editions[row] += 1
        self._asked[row] = _NEVER_ASKED
        n = len(points)
        at = self._points[row]
        at[:n], at[n:] = points, np.inf
        self._reached[row] = np.ceil(at * (1 - _ROUNDING))
        self._longest[row] = at[n - 1]
        self._weights[row, :n], self._weights[row, n:] = weights, 0.0
        mass, moment = self._mass[row], self._moment[row]
        mass[n:] = moment[n:] = 0.0
        mass[:n] = weights
        moment[:n] = mass[:n] * at[:n]
        cdf = self._cdf[row]
        np.cumsum(mass[:n], out=cdf[:n])
        cdf[n - 1 : n], cdf[n:] = 1.0, _NEVER
        mass[:n] = np.cumsum(mass[:n][::-1])[::-1]
        moment[:n] = np.cumsum(moment[:n][::-1])[::-1]

    def points_of(self, row: int) -> tuple[Floats, Floats]:
        """A row's points and weights exactly as written, so that a mirror's row is
        bit-identical."""
        n = int(np.count_nonzero(self._points[row] < np.inf))
        return self._points[row, :n].copy(), self._weights[row, :n].copy()

    def mean(self, which: Ints, generated: Ints, caps: Ints) -> Floats:
        """E[min(L, cap) | L > generated] per row."""
        first = self._count_generated(which, generated)
        left, mean = self._mass[which, first], self._moment[which, first]
        cut = (self._longest[which] > caps).nonzero()[0]
        if len(cut):
            rows = which[cut]
            last = np.maximum(first[cut], self._count_upto(rows, caps[cut]))
            mean[cut] = mean[cut] - self._moment[rows, last] + caps[cut] * self._mass[rows, last]
        known = left > _NOTHING
        mean /= np.where(known, left, 1.0)
        if known.all():
            return np.minimum(np.maximum(mean, generated), caps)
        tail, room = self._longest[which], np.maximum(caps - generated, 0)
        beyond = generated - tail * np.expm1(-room / tail)
        return np.minimum(np.where(known, np.maximum(mean, generated), beyond), caps)

    def sample(
        self, rng: np.random.Generator, which: Ints, generated: Ints, caps: Ints, times: int = 1
    ) -> Floats:
        """Draws of min(L, cap) | L > generated, (times, rows); the cap if nothing is longer, as in
        Past-Future (Gong et al., ASPLOS 2025, §3.2)."""
        shares = 1.0 - rng.random((times, len(which)))
        return self.after(which, generated, caps).quantiles(shares, to_cap=True)

    def after(self, which: Ints, generated: Ints, caps: Ints) -> "After":
        """The remaining distribution of each, for several queries."""
        first = self._count_generated(which, generated)
        left = self._mass[which, first]
        return After(self, which, generated, caps, first, left, left > _NOTHING)

    def _count_generated(self, which: Ints, generated: Ints) -> Ints:
        """`_count_upto`, which finds the counts of the last call for a row again: a round asks
        several times for the same progress."""
        counts = self._counted[which]
        new = (self._asked[which] != generated).nonzero()[0]
        if len(new):
            rows, tokens = which[new], generated[new]
            counts[new] = found = self._count_upto(rows, tokens)
            self._asked[rows], self._counted[rows] = tokens, found
        return counts

    def _count_upto(self, which: Ints, tokens: Ints) -> Ints:
        """How many points of each row are <= tokens."""
        return _search(self._reached, which, (tokens + 1).astype(np.float32))

    def _take(self) -> int:
        if not self._free:
            self._grow()
        return self._free.pop()

    def _grow(self) -> None:
        """Doubles the rows; copies the existing ones once."""
        rows = len(self._uses)
        fresh = ForecastTable(rows)
        for name in _ARRAYS:
            setattr(self, name, np.concatenate([getattr(self, name), getattr(fresh, name)]))
        self._uses += [0] * rows
        self._free = list(range(rows, 2 * rows))[::-1] + self._free


@dataclass(slots=True)
class After:
    """Rows of a table given their progress, L | L > generated: for each its first point beyond, the
    mass from there on, and whether there is any. Looked up once for all queries."""

    _table: ForecastTable
    _which: Ints
    _generated: Ints
    _caps: Ints
    _first: Ints
    _left: Floats
    _known: NDArray[np.bool_]

    def select(self, at: Ints) -> "After":
        """These of the rows, each as often as it is named."""
        which, generated, caps = self._which[at], self._generated[at], self._caps[at]
        first, left, known = self._first[at], self._left[at], self._known[at]
        return After(self._table, which, generated, caps, first, left, known)

    def points(self, at: Ints, begin: int, count: int) -> tuple[Floats, Floats]:
        """min(L, cap) | L > generated of the rows `at`, as points beyond the generated tokens and
        their masses, both (count, at): of each row's ascending points those from the `begin`-th on,
        at most MAX_POINTS of all; after the last, points without mass. O(at · count)."""
        table, which, known = self._table, self._which[at], self._known[at]
        column = _COLUMNS[:count, None] + (np.where(known, self._first[at], 0) + begin)
        outside = column >= MAX_POINTS
        column += which * MAX_POINTS
        points = table._points.reshape(-1).take(column, mode="clip")
        masses = table._weights.reshape(-1).take(column, mode="clip")
        points[outside], masses[outside] = np.inf, 0.0
        masses *= 1.0 / np.where(known, self._left[at], 1.0)
        outlived = (~known).nonzero()[0]
        if len(outlived):
            ahead = _TAIL_AHEAD[begin : begin + count, None] * table._longest[which[outlived]]
            points[:, outlived] = self._generated[at[outlived]] + ahead
            masses[:, outlived] = 1 / MAX_POINTS
        return np.minimum(points, self._caps[at], out=points), masses

    def quantiles(self, shares: Floats, to_cap: bool = False) -> Floats:
        """The smallest l with P(min(L, cap) ≤ l | L > generated) ≥ share, for `shares` of shape
        (rows,) or (times, rows). With `to_cap`, the cap if nothing is longer."""
        column = _search(self._table._cdf, self._which, self._target(shares))
        column = np.maximum(column, self._first)
        drawn = self._table._points[self._which, np.minimum(column, MAX_POINTS - 1)]
        if self._known.all():
            return np.asarray(np.minimum(drawn, self._caps))
        beyond = self._caps if to_cap else self._beyond(shares)
        return np.minimum(np.where(self._known, drawn, beyond), self._caps)

    def quantiles_upto(self, upto: Ints, shares: Floats) -> tuple[Floats, Ints]:
        """Of the `quantiles` of these shares, (times, rows), all that are at most the row's `upto`
        and perhaps others, with the row of each. Only these are searched."""
        table, which = self._table, self._which
        target, last = self._target(shares), table._count_upto(which, upto)
        ends_by = table._cdf[which, np.maximum(last - 1, 0)]
        ends_by[last == 0] = 0.0
        near = target <= np.where(self._known, ends_by, _NEVER)
        row = np.broadcast_to(np.arange(len(which)), near.shape)[near]
        own = self.select(row)
        column = np.maximum(_search(table._cdf, own._which, target[near]), own._first)
        drawn = table._points[own._which, np.minimum(column, MAX_POINTS - 1)]
        if not own._known.all():
            drawn = np.where(own._known, drawn, own._beyond(shares[near]))
        return np.minimum(drawn, own._caps), row

    def _target(self, shares: Floats) -> Floats:
        """The cumulative mass at which these shares of the rest are reached."""
        target = 1.0 - self._left * (1.0 - shares)
        target -= 1e-12
        return target

    def _beyond(self, shares: Floats) -> Floats:
        """The quantiles past the last point."""
        tail = self._table._longest[self._which]
        with np.errstate(divide="ignore"):
            longer: Floats = np.maximum(1.0, -tail * np.log1p(-shares))
        return self._generated + longer

    def longest(self) -> Floats:
        """The last quantile, without a search."""
        last = self._table._longest[self._which]
        return np.minimum(np.where(self._known, last, self._caps), self._caps)

    def survival(self, tokens: Ints) -> Floats:
        """P(min(L, cap) > generated + tokens | L > generated) for `tokens` of shape (times, rows):
        that this many more are generated and at least one more follows; 0 from the cap on.
        O(times · rows)."""
        table, which = self._table, self._which
        column = self._count_ahead(tokens)
        column += which * (MAX_POINTS + 1)
        share = table._mass.reshape(-1).take(column, mode="clip")
        share /= np.where(self._known, self._left, 1.0)
        if not self._known.all():
            outlived = ~self._known
            tail = self._table._longest[self._which[outlived]]
            share[:, outlived] = np.exp(-tokens[:, outlived] / tail)
        share *= tokens < self._caps - self._generated
        return share

    def _count_ahead(self, tokens: Ints) -> Ints:
        """How many points of each row are reached before this many more tokens are generated and
        one more follows, (times, rows). Most of these lie within NEAR points of the first one
        beyond, which are compared as short numbers; only other rows are searched."""
        reached, which, first = self._table._reached, self._which, self._first
        begin = (self._generated + 1).astype(np.float32)
        start = which * MAX_POINTS + np.minimum(first, MAX_POINTS - NEAR)
        ahead = _windows(reached, NEAR)[start].T - begin  # those before the first one are negative
        most = tokens.max(axis=0)
        far = ((ahead[-1] < most) & (first < MAX_POINTS - NEAR)).nonzero()[0]
        if len(far) > len(which) // 2 or int(most.max(initial=0)) > LONGEST_NEAR:
            return _search(reached, which, begin + tokens.astype(np.float32))
        near = np.clip(ahead, -1.0, LONGEST_NEAR).astype(np.int16, order="C")
        short, below = tokens.astype(np.int16), np.empty(tokens.shape, bool)
        count = np.zeros(tokens.shape, np.int8)
        for point in near:
            count += np.less(point, short, out=below).view(np.int8)
        column: Ints = np.add(np.minimum(first, MAX_POINTS - NEAR), count, dtype=np.int64)
        if len(far):
            targets = begin[far] + tokens[:, far].astype(np.float32)
            column[:, far] = _search(reached, which[far], targets)
        return column


def _windows(table: NDArray[_Float], size: int) -> NDArray[_Float]:
    """All runs of so many values of a table, as a view."""
    return np.lib.stride_tricks.sliding_window_view(table.reshape(-1), size)


def _search(table: NDArray[_Float], which: Ints, target: NDArray[_Float]) -> Ints:
    """How many values of its ascending row lie below the target, for each of `which`."""
    if len(which) and (which == which[0]).all():  # all of one population
        below_target: Ints = table[which[0]].searchsorted(target)
        return below_target
    flat, start = table.reshape(-1), which * MAX_POINTS
    at = np.empty(target.shape, np.int64)
    at[...] = start
    found, below = np.empty(target.shape, table.dtype), np.empty(target.shape, bool)
    steps = below.view(np.int8)
    for step in _STEPS:
        # No index is out of bounds; without the check numpy reads twice as fast.
        flat[step - 1 :].take(at, out=found, mode="clip")
        np.less(found, target, out=below)
        steps *= np.int8(step)
        at += steps
    at -= start
    return at


_ARRAYS = (
    "_points", "_reached", "_longest", "_weights", "_cdf", "_mass", "_moment", "_editions",
    "_asked", "_counted",
)  # fmt: skip
_COLUMNS = np.arange(MAX_POINTS)
_TAIL_AHEAD = -np.log1p(-(np.arange(MAX_POINTS) + 0.5) / MAX_POINTS)  # means; ascending
_ENDLESS = 1e18  # the last point of a row without points: it reaches every cap
_NEVER = 2.0  # above every share of mass
_NEVER_ASKED = -1
_NOTHING = 1e-12  # mass below this is rounding
NEAR = 16  # points that are compared one after the other where a search costs more
LONGEST_NEAR = 2**15 - 1  # tokens ahead that these comparisons can tell apart
_ROUNDING = 2.0**-40  # of a point; tokens are far coarser than this
_STEPS = (32, 16, 8, 4, 2, 1, 1)  # all 64 points
