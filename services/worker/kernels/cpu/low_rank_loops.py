"""Low-rank products of a few rows with each one's adapter, compiled by Numba.

A group of a few rows has too little work for a library's products, of which each group needs two
for each part of a map. Here one call computes all groups. Numbers are float32, or the bits of
bfloat16, which are computed in float32 and rounded once.
"""

from functools import cache
from typing import Any

import numpy as np
from numba import njit, prange

from services.worker.kernels.cpu.kernel_cache import cached
from services.worker.kernels.cpu.number_formats import real, stored

_ZERO = np.float32(0.0)
ROWS = 4  # of a matrix that are read together, so that sums stay in registers


@njit(fastmath=True, nogil=True, error_model="numpy")
def _dots(x: Any, down: Any, low: Any) -> None:
    """low = down · x, for down [ranks, in]."""
    ranks = len(low)
    whole = ranks - ranks % ROWS
    for first in range(0, whole, ROWS):
        a, b, c, d = down[first], down[first + 1], down[first + 2], down[first + 3]
        sum_a = sum_b = sum_c = sum_d = _ZERO
        for i in range(len(x)):
            number = real(x[i])
            sum_a += number * real(a[i])
            sum_b += number * real(b[i])
            sum_c += number * real(c[i])
            sum_d += number * real(d[i])
        low[first], low[first + 1], low[first + 2], low[first + 3] = sum_a, sum_b, sum_c, sum_d
    for at in range(whole, ranks):
        a, total = down[at], _ZERO
        for i in range(len(x)):
            total += real(x[i]) * real(a[i])
        low[at] = total


@njit(fastmath=True, nogil=True, error_model="numpy")
def _sums(low: Any, up: Any, out: Any) -> None:
    """out += low · up, for up [ranks, out]."""
    ranks = len(low)
    whole = ranks - ranks % ROWS
    total = np.zeros(len(out), np.float32)
    for first in range(0, whole, ROWS):
        a, b, c, d = up[first], up[first + 1], up[first + 2], up[first + 3]
        in_a, in_b, in_c, in_d = low[first], low[first + 1], low[first + 2], low[first + 3]
        for i in range(len(out)):
            total[i] += (
                in_a * real(a[i]) + in_b * real(b[i]) + in_c * real(c[i]) + in_d * real(d[i])
            )
    for at in range(whole, ranks):
        a, number = up[at], low[at]
        for i in range(len(out)):
            total[i] += number * real(a[i])
    for i in range(len(out)):
        out[i] = stored(real(out[i]) + total[i], out[i])


@cache
def adding(many: bool) -> Any:
    """The products, computed by one thread or by many."""

    def adding(
        x: Any, down: Any, up: Any, widths: Any, ranks: Any, rows: Any, slots: Any, out: Any
    ) -> None:
        """out[row] += x[row] · down[slot] · up[slot] for each of `rows` and its slot of `slots`,
        as LowRankMap describes them. O(rows · rank · (parts · in + out))."""
        for at in prange(len(rows)):
            row, slot = rows[at], slots[at]
            rank = ranks[slot]
            low = np.empty(rank * len(widths), np.float32)
            if rank:
                _dots(x[row], down[slot, : len(low)], low)
            column = 0
            for part in range(len(widths)):
                of_part = low[part * rank : (part + 1) * rank]
                end = column + widths[part]
                changed = False  # a part that the adapter does not have is zero
                for number in of_part:
                    changed |= number != _ZERO
                if changed:
                    _sums(of_part, up[slot, :rank, column:end], out[row, column:end])
                column = end

    # decode_loops.py explains the two names.
    adding.__qualname__ += "_by_many" if many else "_by_one"
    return cached(njit(adding, nogil=True, cache=True, error_model="numpy", parallel=many))
