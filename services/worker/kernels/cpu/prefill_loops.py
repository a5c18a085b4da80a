"""Attention of a prompt's chunk over its context and itself, compiled by Numba.

Each tile of queries by keys is a matrix product (matmul_ops.py). Maxima and sums of weights are
kept over the tiles, so that the scores of one tile are in memory at a time. A vector holds sixteen
queries; keys and values are read from the blocks in place.
"""

from typing import Any

import numpy as np
from numba import njit, prange

from services.worker.kernels.cpu.codegen.vectors import LANES
from services.worker.kernels.cpu.decode_loops import cap
from services.worker.kernels.cpu.exponential import exponential
from services.worker.kernels.cpu.kernel_cache import cached
from services.worker.kernels.cpu.matmul import WIDE, columns
from services.worker.kernels.cpu.number_formats import real

QUERIES = 192  # of a tile, over all heads that share keys: its scores fit in a core's cache
KEYS = 64  # of a tile
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
_NEVER = np.float32(-1e30)  # the score of an invisible position


@njit(inline="always")
def _multiply(x: Any, weight: Any, added: bool, out: Any) -> None:
    """out = x · weight, or += if `added`; the number of outputs is a multiple of LANES."""
    rows, outputs = out.shape
    wide = outputs - outputs % WIDE
    for column in range(0, wide, WIDE):
        columns(WIDE, added, x, 0, rows, weight, column, out)
    for column in range(wide, outputs, LANES):
        columns(LANES, added, x, 0, rows, weight, column, out)


@njit(inline="always", fastmath=True)
def _read(data: Any, scales: Any, side: int, table: Any, head: int, first: int, into: Any) -> None:
    """into [count, dim] = a head's keys or values from position `first` on, as float32."""
    block_tokens = data.shape[3]
    for n in range(len(into)):
        block, offset = table[(first + n) // block_tokens], (first + n) % block_tokens
        numbers, line = data[side, block, head, offset], into[n]
        scale = scales[side, block, head, offset] if scales.size else _ONE
        for i in range(len(numbers)):
            line[i] = real(numbers[i]) * scale


@njit(inline="always", fastmath=True)
def _lay_out_queries(q: Any, scale: Any, queries: Any) -> None:
    """Writes q [tokens, group, dim], scaled, to the columns of queries [dim, tokens · group …]."""
    group = q.shape[1]
    for token in range(q.shape[0]):
        for g in range(group):
            for i in range(q.shape[2]):
                queries[i, token * group + g] = q[token, g, i] * scale


@njit(inline="always")
def _set_visible_ranges(first: int, group: int, window: int, seen_from: Any, seen_to: Any) -> None:
    """Sets the visible positions of each query, [seen_from, seen_to)."""
    for j in range(len(seen_from)):
        seen_to[j] = first + j // group + 1
        seen_from[j] = max(0, seen_to[j] - window) if window > 0 else 0


@njit(inline="always", fastmath=True)
def _write_outputs(made: Any, sums: Any, out: Any) -> None:
    """Writes the normalised sums to out [tokens, group, dim]."""
    group = out.shape[1]
    for token in range(out.shape[0]):
        for g in range(group):
            j = token * group + g
            share = _ONE / sums[j]
            for i in range(out.shape[2]):
                out[token, g, i] = made[i, j] * share


@njit(inline="always", fastmath=True)
def _cap_scores(scores: Any, softcap: Any) -> None:
    for n in range(scores.shape[0]):
        cap(scores[n], softcap)


@njit(inline="always", fastmath=True)
def _scale(made: Any, by: Any) -> None:
    for i in range(made.shape[0]):
        line = made[i]
        for j in range(len(line)):
            line[j] *= by[j]


@njit(inline="always", fastmath=True)
def _mask_scores(scores: Any, first: int, seen_from: Any, seen_to: Any) -> None:
    """Masks the scores of keys, from position `first` on, outside each query's visible range
    [seen_from, seen_to)."""
    for n in range(scores.shape[0]):
        line, position = scores[n], np.int32(first + n)
        for j in range(len(line)):
            hidden = position < seen_from[j] or position >= seen_to[j]
            line[j] = _NEVER if hidden else line[j]


@njit(inline="always", fastmath=True)
def _weigh(scores: Any, tops: Any, sums: Any, before: Any) -> None:
    """Converts scores to weights relative to the running maximum. `before` becomes the factor that
    rescales earlier weights."""
    wide = len(tops)
    for j in range(wide):
        before[j] = tops[j]
    for n in range(scores.shape[0]):
        line = scores[n]
        for j in range(wide):
            tops[j] = max(tops[j], line[j])
    for j in range(wide):
        before[j] = exponential(before[j] - tops[j])
        sums[j] *= before[j]
    for n in range(scores.shape[0]):
        line = scores[n]
        for j in range(wide):
            weight = exponential(line[j] - tops[j])
            line[j] = weight
            sums[j] += weight


@njit(fastmath=True, error_model="numpy", nogil=True)
def _attend_tile(
    data: Any,
    scales: Any,
    table: Any,
    start: int,
    first: int,
    last: int,
    kv_head: int,
    place: int,
    q: Any,
    out: Any,
    scale: Any,
    window: int,
    softcap: Any,
) -> None:
    """Computes the queries at positions [first, last) of all heads that share a KV head."""
    group, dim = q.shape[1] // data.shape[2], data.shape[4]
    wide = -(-(last - first) * group // LANES) * LANES
    queries = np.zeros((dim, wide), np.float32)
    seen_from, seen_to = np.zeros(wide, np.int32), np.zeros(wide, np.int32)
    own = slice(place + first - start, place + last - start)
    heads = slice(kv_head * group, (kv_head + 1) * group)
    _lay_out_queries(q[own, heads], scale, queries)
    _set_visible_ranges(first, group, window, seen_from[: (last - first) * group], seen_to)
    lead = max(0, first + 1 - window) if window > 0 else 0
    numbers, room = np.empty((KEYS, dim), np.float32), np.empty((KEYS, wide), np.float32)
    made = np.zeros((dim, wide), np.float32)
    tops = np.full(wide, _NEVER)
    sums, before = np.zeros(wide, np.float32), np.empty(wide, np.float32)
    for at in range(lead, last, KEYS):
        count = min(KEYS, last - at)
        stored, scores = numbers[:count], room[:count]
        _read(data, scales, 0, table, kv_head, at, stored)
        _multiply(stored, queries, False, scores)
        _cap_scores(scores, softcap)
        if at + count > first + 1 or window > 0:
            _mask_scores(scores, at, seen_from, seen_to)
        _weigh(scores, tops, sums, before)
        _scale(made, before)
        _read(data, scales, 1, table, kv_head, at, stored)
        _multiply(stored.T, scores, True, made)
    _write_outputs(made, sums, out[own, heads])


@cached
@njit(nogil=True, cache=True, error_model="numpy", parallel=True)
def attend(
    data: Any,
    scales: Any,
    table: Any,
    start: int,
    end: int,
    place: int,
    q: Any,
    out: Any,
    scale: Any,
    window: int,
    softcap: Any,
    threads: int,
) -> None:
    """out[place : place + end − start] = causal attention of the queries at positions [start, end).
    Tiles are distributed over `threads`, Numba's current number.

    data [2, blocks, kv_heads, block_tokens, dim]; scales [2, blocks, kv_heads, block_tokens] of an
    INT8 layer, else empty; table [blocks]; q and out [Σ tokens, heads, dim], float32. window and
    softcap 0: none. O((end − start) · end · heads · dim).
    """
    kv_heads = data.shape[2]
    most = max(1, QUERIES // (q.shape[1] // kv_heads))  # tokens of a tile
    tasks = -(-(end - start) // most) * kv_heads
    each = -(-tasks // threads)
    for number in prange(each * threads):
        # A thread gets consecutive numbers. Later tiles have more context, so that tiles are
        # assigned to threads in turn.
        task = number % each * threads + number // each
        if task < tasks:
            first, kv_head = start + task // kv_heads * most, task % kv_heads
            last = min(first + most, end)
            about = (start, first, last, kv_head, place, q, out, scale, window, softcap)
            _attend_tile(data, scales, table, *about)
