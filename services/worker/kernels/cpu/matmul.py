"""Products of a step's rows with a small matrix, compiled by Numba.

For few rows and a matrix that fits in a core's cache, libraries spend more time on preparation than
on computing, and some do not use the full vectors of the processor. Measured with AVX-512: twice
the library's speed in float32 for any number of rows; in bfloat16, which processors multiply in
pairs, three times for one row, and equal at about forty rows.
"""

from functools import cache
from typing import Any

from numba import njit, prange

from services.worker.kernels.cpu.codegen.matmul_ops import multiply, multiply_some
from services.worker.kernels.cpu.codegen.vectors import LANES
from services.worker.kernels.cpu.kernel_cache import cached
from services.worker.kernels.cpu.number_formats import reals

ROWS, PAIR = 6, 2  # rows of a tile: registers hold WIDE sums of each, and one row of weights
WIDE = 4 * LANES
TOGETHER = 48  # rows of a task, a multiple of ROWS


@njit(inline="always")
def columns(
    wide: int, added: bool, x: Any, first: int, last: int, weight: Any, column: int, out: Any
) -> None:
    """out[first : last, column : column + wide] = x · weight, or += if `added`; `wide` is a
    constant, a multiple of LANES."""
    whole = last - (last - first) % ROWS
    paired = last - (last - whole) % PAIR
    for row in range(first, whole, ROWS):
        multiply(ROWS, wide, added, x, row, weight, column, out)
    for row in range(whole, paired, PAIR):
        multiply(PAIR, wide, added, x, row, weight, column, out)
    for row in range(paired, last):
        multiply(1, wide, added, x, row, weight, column, out)


@njit(inline="always")
def _last_columns(
    some: int, added: bool, x: Any, first: int, last: int, weight: Any, column: int, out: Any
) -> None:
    """As `columns`, for `some` columns, fewer than LANES."""
    paired = last - (last - first) % PAIR
    for row in range(first, paired, PAIR):
        multiply_some(PAIR, some, added, x, row, weight, column, out)
    for row in range(paired, last):
        multiply_some(1, some, added, x, row, weight, column, out)


@cache
def product(many: bool) -> Any:
    """The product, computed by one thread or by many."""

    def multiplying(x: Any, weight: Any, added: bool, out: Any) -> None:
        """out = x · weight, or out += x · weight if `added`; x [rows, in], weight [in, out], out
        [rows, out], all of one type. O(rows · in · out)."""
        numbers, rows, outputs = reals(x), out.shape[0], out.shape[1]
        wides, blocks = outputs // WIDE, -(-outputs // WIDE)
        for task in prange(-(-rows // TOGETHER) * blocks):
            first, column = task // blocks * TOGETHER, task % blocks * WIDE
            last = min(first + TOGETHER, rows)
            if column < wides * WIDE:
                columns(WIDE, added, numbers, first, last, weight, column, out)
            else:
                some = outputs % LANES
                for at in range(column, outputs - some, LANES):
                    columns(LANES, added, numbers, first, last, weight, at, out)
                if some:
                    at = outputs - some
                    _last_columns(some, added, numbers, first, last, weight, at, out)

    # decode_loops.py explains the two names.
    multiplying.__qualname__ += "_by_many" if many else "_by_one"
    return cached(njit(multiplying, nogil=True, cache=True, error_model="numpy", parallel=many))
