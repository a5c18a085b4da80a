"""Attention that reads blocks in place, and stores into blocks, compiled by Numba.

Loops over NumPy views of a layer, O(context · head_dim) per row and head. attention_ops.py
processes the keys and values of one block. Memory: the scores of one row and KV head.

Stored numbers are float32, int8, or int16: the bits of a bfloat16.
"""

from functools import cache
from typing import Any

import numpy as np
from numba import njit, prange

from services.worker.kernels.cpu.codegen.attention_ops import (
    LINE_BYTES,
    prefetch,
    raise_to_weights,
    score,
    weigh,
)
from services.worker.kernels.cpu.codegen.vectors import LANES
from services.worker.kernels.cpu.exponential import tanh
from services.worker.kernels.cpu.kernel_cache import cached
from services.worker.kernels.cpu.number_formats import real

AHEAD = 3  # blocks prefetched ahead of the one in use
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
_INT8_MAX = np.float32(127.0)
_NEVER = np.float32(-1e30)  # the score of a position without a token


@njit(inline="always", fastmath=True)
def _mask_outside(scores: Any, first: int, last: int) -> None:
    """Masks all scores outside [first:last]."""
    for t in range(first):
        scores[t] = _NEVER
    for t in range(last, len(scores)):
        scores[t] = _NEVER


@njit(inline="always", fastmath=True)
def _softmax_weights(scores: Any) -> Any:
    """Replaces scores [a multiple of LANES] with e^(score − maximum); returns their sum."""
    top = scores[0]
    for t in range(len(scores)):
        top = max(top, scores[t])
    totals = np.zeros(LANES, np.float32)
    for t in range(0, len(scores), LANES):
        raise_to_weights(scores, t, top, totals)
    total = _ZERO
    for t in range(LANES):
        total += totals[t]
    return total


@njit(inline="always", fastmath=True)
def cap(scores: Any, softcap: Any) -> None:
    if softcap > _ZERO:
        for t in range(len(scores)):
            scores[t] = softcap * tanh(scores[t] / softcap)


@njit(inline="always", fastmath=True)
def _rescale(scores: Any, at: int, scales: Any, first: int, last: int) -> None:
    """Multiplies the scores of tokens [first, last) of a block by the INT8 scales of their keys or
    values. `scales` is empty if the layer is not INT8."""
    if scales.size:
        for g in range(len(scores)):
            for t in range(last - first):
                scores[g, at + t] *= scales[first + t]


@njit(inline="always")
def _scales_of(scales: Any, side: int, block: int, head: int) -> Any:
    return scales[side, block, head] if scales.size else scales[:0, 0, 0, 0]


@njit(inline="always")
def _fetch(block: Any) -> None:
    """Prefetches all cache lines of a head's block."""
    for at in range(0, block.size, LINE_BYTES // block.itemsize):
        prefetch(block, at)


@njit(inline="always")
def _score_block(
    dim: int, tile: int, keys: Any, first: int, last: int, queries: Any, scores: Any, at: int
) -> None:
    """scores[g, at…] = keys[first:last] · queries[g], for every query; computes whole tiles."""
    group = len(queries)
    for t in range(first, last, tile):
        for g in range(0, group - 1, 2):
            score(dim, tile, 2, keys, t, queries, scores, g, at + t - first)
        if group % 2:
            score(dim, tile, 1, keys, t, queries, scores, group - 1, at + t - first)


@njit(inline="always")
def _weigh_block(
    dim: int, tile: int, values: Any, first: int, last: int, weights: Any, at: int, made: Any
) -> None:
    """made[g] += weights[g, at…] · values[first:last], for every query. Reads no further values:
    one that was never stored may be NaN, which a weight of 0 does not remove."""
    group = len(made)
    for t in range(first, last - tile + 1, tile):
        for g in range(0, group - 1, 2):
            weigh(dim, tile, 2, values, t, weights, made, g, at + t - first)
        if group % 2:
            weigh(dim, tile, 1, values, t, weights, made, group - 1, at + t - first)
    for t in range(last - (last - first) % tile, last):
        for g in range(group):
            weigh(dim, 1, 1, values, t, weights, made, g, at + t - first)


@cache
def attention(dim: int, tile: int, many: bool) -> Any:
    """Attention with one thread or many, over rows × KV heads, for heads of `dim` numbers and
    blocks of a multiple of `tile` tokens, a power of two up to LANES. Both are compile-time
    constants, so that loops over them are unrolled."""
    filled = -(-dim // LANES) * LANES

    def attend(
        data: Any,
        scales: Any,
        tables: Any,
        owners: Any,
        positions: Any,
        places: Any,
        q: Any,
        out: Any,
        scale: Any,
        window: int,
        softcap: Any,
    ) -> None:
        """out[places[r]] = causal attention of the query of every row r over its context.

        data [2, blocks, kv_heads, block_tokens, dim]; scales [2, blocks, kv_heads, block_tokens]
        of an INT8 layer, else empty; tables [sequences, blocks]; owners [rows], indices of tables;
        positions [rows]; places [rows], indices of q and out [Σ tokens, heads, dim], float32.
        window and softcap 0: none.
        """
        block_tokens, kv_heads = data.shape[3], data.shape[2]
        group = q.shape[1] // kv_heads
        for number in prange(len(positions) * kv_heads):
            row, kv_head = number // kv_heads, number % kv_heads
            table, place, head = tables[owners[row]], places[row], kv_head * group
            end = positions[row] + 1
            start = max(0, end - window) if window > 0 else 0
            lead = start // tile * tile  # whole tiles are scored, and invisible positions masked
            scores = np.empty((group, -(-(end - lead) // LANES) * LANES), np.float32)
            queries = np.zeros((group, filled), np.float32)
            for g in range(group):
                for i in range(dim):
                    queries[g, i] = q[place, head + g, i] * scale
            final = (end - 1) // block_tokens
            for index in range(start // block_tokens, final + 1):
                _fetch(data[0, table[min(index + AHEAD, final)], kv_head])
                origin, block = index * block_tokens, table[index]
                first, last = max(lead - origin, 0), min(end - origin, block_tokens)
                at, keys = origin + first - lead, data[0, block, kv_head]
                _score_block(dim, tile, keys, first, last, queries, scores, at)
                _rescale(scores, at, _scales_of(scales, 0, block, kv_head), first, last)
            sums, made = np.empty(group, np.float32), np.zeros((group, filled), np.float32)
            for g in range(group):
                cap(scores[g, start - lead : end - lead], softcap)
                _mask_outside(scores[g], start - lead, end - lead)
                sums[g] = _softmax_weights(scores[g])
            for index in range(start // block_tokens, final + 1):
                _fetch(data[1, table[min(index + AHEAD, final)], kv_head])
                origin, block = index * block_tokens, table[index]
                first, last = max(start - origin, 0), min(end - origin, block_tokens)
                at, values = origin + first - lead, data[1, block, kv_head]
                _rescale(scores, at, _scales_of(scales, 1, block, kv_head), first, last)
                _weigh_block(dim, tile, values, first, last, scores, at, made)
            for g in range(group):
                share = _ONE / sums[g]
                for i in range(dim):
                    out[place, head + g, i] = made[g, i] * share

    # Numba's disk cache identifies a function by its name and code, not by its compile options:
    # with one name, the single-threaded code would be loaded for many threads.
    attend.__qualname__ += "_by_many" if many else "_by_one"
    # A row with NaN may divide by 0, which affects only that row and must not fail the batch.
    compiled = njit(
        attend, fastmath=True, error_model="numpy", nogil=True, cache=True, parallel=many
    )
    return cached(compiled)


@cached
@njit(nogil=True, cache=True)
def store(side: Any, slots: Any, x: Any) -> None:
    """Stores x [Σ tokens, kv_heads, dim] to side [blocks, kv_heads, block_tokens, dim], which have
    the same type."""
    block_tokens = side.shape[2]
    for token in range(len(slots)):
        block, offset = slots[token] // block_tokens, slots[token] % block_tokens
        for head in range(x.shape[1]):
            for i in range(x.shape[2]):
                side[block, head, offset, i] = x[token, head, i]


@cached
@njit(nogil=True, cache=True)
def store_int8(
    side: Any, scales: Any, slots: Any, x: Any, least_scale: Any, largest_scale: Any
) -> None:
    """As `store`, into int8, symmetric per (token, head), with the bits of the reference's
    `quantize`. scales [blocks, kv_heads, block_tokens]."""
    block_tokens = side.shape[2]
    for token in range(len(slots)):
        block, offset = slots[token] // block_tokens, slots[token] % block_tokens
        for head in range(x.shape[1]):
            largest = _ZERO
            for i in range(x.shape[2]):
                largest = max(largest, abs(real(x[token, head, i])))
            scale = min(max(largest / _INT8_MAX, least_scale), largest_scale)
            for i in range(x.shape[2]):
                code = np.rint(real(x[token, head, i]) / scale)
                side[block, head, offset, i] = np.int8(min(max(code, -_INT8_MAX), _INT8_MAX))
            scales[block, head, offset] = scale if largest > _ZERO else _ZERO
