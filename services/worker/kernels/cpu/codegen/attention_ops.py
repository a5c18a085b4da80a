"""Vector code of attention over a block of keys and values (see codegen/vectors.py).

Numba sums the lanes of a dot product for each key separately. This code folds the sums of sixteen
keys into one vector, with 45 operations instead of 128, and reads each key and value once for two
queries.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from services.worker.kernels.cpu import exponential
from services.worker.kernels.cpu.codegen.vectors import (
    BYTE,
    FLOATS,
    INT32,
    INT32S,
    LANES,
    Code,
    builds,
    vector_parts,
)

LINE_BYTES = 64


def _fold_lanes(level: int) -> tuple[list[int], list[int]]:
    """Two shuffles of two vectors with partial sums of 2^level keys each; the sum of the shuffled
    vectors holds the partial sums of both. Processors have these shuffles: pairs within quarters,
    then quarters."""
    quarters = {
        0: ([0, 16, 1, 17], [2, 18, 3, 19]),
        1: ([0, 1, 16, 17], [2, 3, 18, 19]),
    }
    if level in quarters:
        low, high = (
            [quarter * 4 + lane for quarter in range(4) for lane in lanes]
            for lanes in quarters[level]
        )
        return low, high
    halves = {2: ([0, 1, 4, 5], [2, 3, 6, 7]), 3: ([0, 2, 4, 6], [1, 3, 5, 7])}
    low, high = (
        [quarter * 4 + lane for quarter in lanes for lane in range(4)] for lanes in halves[level]
    )
    return low, high


def _score_code(typing_context: Any, dim: Any, tile: Any, count: Any, keys: Any, token: Any,
             queries: Any, scores: Any, first: Any, at: Any) -> Any:  # fmt: skip
    """scores[first + n, at : at + tile] = keys[token : token + tile] · queries[first + n], for n <
    count; keys [tokens, dim], queries [·, dim, padded with zeros to a multiple of LANES]."""
    dims, tiles, counts = (each.literal_value for each in (dim, tile, count))

    def build(code: Code) -> None:
        token, first, at = (code.number(argument) for argument in (4, 7, 8))
        parts = vector_parts(dims)
        rows = [code.plus(first, n) for n in range(counts)]
        query_parts = [[code.load(code.place(5, row, begin)) for begin, _ in parts] for row in rows]

        def products(key: int) -> list[Any]:
            line = code.plus(token, key)
            numbers = [code.load(code.place(3, line, begin), size) for begin, size in parts]
            totals = []
            for query in query_parts:
                total = code.product(numbers[0], query[0])
                for number, part in zip(numbers[1:], query[1:], strict=True):
                    total = code.sum(code.product(number, part), total)
                totals.append(total)
            return totals

        def fold(key: int, level: int) -> list[Any]:
            """The sums of 2^level keys from `key` on. Keys beyond the tile repeat earlier sums."""
            if level == 0:
                return products(key)
            left, half = fold(key, level - 1), 1 << (level - 1)
            right = fold(key + half, level - 1) if half < tiles else left
            low, high = _fold_lanes(level - 1)
            return [
                code.sum(code.shuffled(a, b, low), code.shuffled(a, b, high))
                for a, b in zip(left, right, strict=True)
            ]

        for row, total in zip(rows, fold(0, LANES.bit_length() - 1), strict=True):
            code.store(total, code.place(6, row, at), tiles)

    arguments = (dim, tile, count, keys, token, queries, scores, first, at)
    return types.void(*arguments), builds(build)


def _weigh_code(typing_context: Any, dim: Any, tile: Any, count: Any, values: Any, token: Any,
              weights: Any, out: Any, first: Any, at: Any) -> Any:  # fmt: skip
    """out[first + n] += weights[first + n, at : at + tile] · values[token : token + tile], for n <
    count; values [tokens, dim], out [·, dim, padded to a multiple of LANES]."""
    dims, tiles, counts = (each.literal_value for each in (dim, tile, count))

    def build(code: Code) -> None:
        token, first, at = (code.number(argument) for argument in (4, 7, 8))
        parts = vector_parts(dims)
        rows = [code.plus(first, n) for n in range(counts)]
        places = [[code.place(6, row, begin) for begin, _ in parts] for row in rows]
        totals = [[code.load(place) for place in each] for each in places]
        for number in range(tiles):
            line, column = code.plus(token, number), code.plus(at, number)
            numbers = [code.load(code.place(3, line, begin), size) for begin, size in parts]
            for row, total in zip(rows, totals, strict=True):
                weight = code.all(code.builder.load(code.place(5, row, column)))
                for part, value in enumerate(numbers):
                    total[part] = code.sum(code.product(value, weight), total[part])
        for each, total in zip(places, totals, strict=True):
            for place, part in zip(each, total, strict=True):
                code.store(part, place)

    arguments = (dim, tile, count, values, token, weights, out, first, at)
    return types.void(*arguments), builds(build)


def _raise_code(typing_context: Any, scores: Any, at: Any, top: Any, totals: Any) -> Any:
    """Replaces scores[at : at + 16] with e^(score − top), at most 1, and adds them to totals
    [16]."""

    def build(code: Code) -> None:
        place, sums = code.place(0, code.number(1)), code.place(3, 0)
        below = code.builder.fsub(code.load(place), code.all(code.number(2)))
        weights = _exponential(code, below)
        code.store(weights, place)
        code.store(code.sum(code.load(sums), weights), sums)

    return types.void(scores, at, top, totals), builds(build)


def _exponential(code: Code, x: Any) -> Any:
    """e^x in all lanes, with the polynomial of exponential.py."""
    y = code.product(x, code.constant(exponential.LOG2E))
    y = code.call("llvm.maxnum.v16f32", FLOATS, y, code.constant(exponential.LEAST))
    whole = code.call("llvm.rint.v16f32", FLOATS, y)
    f = code.builder.fsub(y, whole)
    part = code.constant(exponential.POWERS[-1])
    for power in reversed(exponential.POWERS[:-1]):
        part = code.sum(code.product(part, f), code.constant(power))
    bits = code.builder.fptosi(whole, INT32S)
    bits = code.builder.add(bits, code.integer(exponential.BIAS))
    bits = code.builder.shl(bits, code.integer(exponential.MANTISSA_BITS))
    return code.product(part, code.builder.bitcast(bits, FLOATS))


def _prefetch_code(typing_context: Any, array: Any, at: Any) -> Any:
    """Prefetches the cache line of element `at`, in memory order, of a contiguous array."""

    def build(code: Code) -> None:
        place = code.builder.gep(code.place(0, *[0] * array.ndim), [code.number(1)])
        address = code.builder.bitcast(place, BYTE.as_pointer())
        read, keep, data = (ir.Constant(INT32, x) for x in (0, 3, 1))
        code.call("llvm.prefetch.p0i8", ir.VoidType(), address, read, keep, data)

    return types.void(array, types.intp), builds(build)


score: Any = intrinsic(prefer_literal=True)(_score_code)
weigh: Any = intrinsic(prefer_literal=True)(_weigh_code)
raise_to_weights: Any = intrinsic(_raise_code)
prefetch: Any = intrinsic(_prefetch_code)
