"""Attention that reads blocks where they lie, and what stores into them, compiled by Numba.

Plain loops over numpy views of a layer, O(context · head_dim) a row and head. The scores of one row
and KV head are all the memory they need. Attention is compiled twice from one source: for one
thread, and for many, over rows × KV heads.

Stored numbers are float32, int8, or int16: the bits of a bfloat16. The exponential is our own, as
Numba calls the C library's for one number at a time: 2^x by its exponent's bits and a polynomial,
within 2e-6 of it for x ≥ −30, and the nearer to 0 the closer.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, prange, types
from numba.core import cgutils
from numba.extending import intrinsic, overload

_LOG2E = np.float32(1.4426950408889634)
_LEAST = np.float32(-126.0)  # of 2^x that is no denormal
_ONE, _HALF, _ZERO, _TWO = np.float32(1.0), np.float32(0.5), np.float32(0.0), np.float32(2.0)
# 2^f, |f| ≤ 0.5: Taylor's, to the sixth power, 1.2e-7 off at most.
_C1, _C2, _C3 = np.float32(0.69314718), np.float32(0.24022651), np.float32(0.055504109)
_C4, _C5, _C6 = np.float32(0.0096181291), np.float32(0.0013333558), np.float32(0.00015403530)
_INT8_MAX = np.float32(127.0)
_LINE_BYTES = 64


def _real(x: Any) -> Any:
    """A stored number as float32."""
    raise NotImplementedError


@overload(_real, inline="always")
def _real_of(x: Any) -> Any:
    return _from_bits if x.bitwidth == 16 else _from_number


def _from_bits(x: Any) -> Any:
    return np.uint32(np.uint32(np.uint16(x)) << np.uint32(16)).view(np.float32)


def _from_number(x: Any) -> Any:
    return np.float32(x)


@njit(inline="always", fastmath=True)
def exponential(x: Any) -> Any:
    """e^x of float32 x ≤ 0; below 1e-38 it is that."""
    y = max(x * _LOG2E, _LEAST)
    whole = np.floor(y + _HALF)
    f = y - whole
    part = _ONE + f * (_C1 + f * (_C2 + f * (_C3 + f * (_C4 + f * (_C5 + f * _C6)))))
    bits = np.int32((np.int32(whole) + np.int32(127)) << np.int32(23))
    return part * bits.view(np.float32)


@njit(inline="always", fastmath=True)
def _tanh(x: Any) -> Any:
    """By e^(−2|x|), which is at most 1."""
    e = exponential(-_TWO * abs(x))
    size = (_ONE - e) / (_ONE + e)
    return size if x >= _ZERO else -size


@njit(inline="always", fastmath=True)
def _dots(q: Any, keys: Any, first: int, last: int, scores: Any, at: int) -> None:
    """scores[at…] = keys[first:last] · q, four keys at a time."""
    dim = len(q)
    t = first
    while t + 4 <= last:
        a = b = c = d = _ZERO
        for i in range(dim):
            x = q[i]
            a += x * _real(keys[t, i])
            b += x * _real(keys[t + 1, i])
            c += x * _real(keys[t + 2, i])
            d += x * _real(keys[t + 3, i])
        scores[at], scores[at + 1], scores[at + 2], scores[at + 3] = a, b, c, d
        t += 4
        at += 4
    while t < last:
        a = _ZERO
        for i in range(dim):
            a += q[i] * _real(keys[t, i])
        scores[at] = a
        t += 1
        at += 1


@njit(inline="always", fastmath=True)
def _dots_of_two(
    p: Any, q: Any, keys: Any, first: int, last: int, of_p: Any, of_q: Any, at: int
) -> None:
    """The same for two queries at once: a key is read, and made a float32, once for both."""
    dim = len(q)
    t = first
    while t + 4 <= last:
        a = b = c = d = e = f = g = h = _ZERO
        for i in range(dim):
            x, y = p[i], q[i]
            one, two = _real(keys[t, i]), _real(keys[t + 1, i])
            three, four = _real(keys[t + 2, i]), _real(keys[t + 3, i])
            a += x * one
            b += x * two
            c += x * three
            d += x * four
            e += y * one
            f += y * two
            g += y * three
            h += y * four
        of_p[at], of_p[at + 1], of_p[at + 2], of_p[at + 3] = a, b, c, d
        of_q[at], of_q[at + 1], of_q[at + 2], of_q[at + 3] = e, f, g, h
        t += 4
        at += 4
    while t < last:
        a = e = _ZERO
        for i in range(dim):
            key = _real(keys[t, i])
            a += p[i] * key
            e += q[i] * key
        of_p[at], of_q[at] = a, e
        t += 1
        at += 1


@njit(inline="always", fastmath=True)
def _add(weights: Any, at: int, values: Any, first: int, last: int, out: Any) -> None:
    """out += weights[at…] · values[first:last], eight values at a time."""
    dim = len(out)
    t = first
    while t + 8 <= last:
        a, b, c, d = weights[at], weights[at + 1], weights[at + 2], weights[at + 3]
        e, f, g, h = weights[at + 4], weights[at + 5], weights[at + 6], weights[at + 7]
        for i in range(dim):
            out[i] += (
                a * _real(values[t, i])
                + b * _real(values[t + 1, i])
                + c * _real(values[t + 2, i])
                + d * _real(values[t + 3, i])
            ) + (
                e * _real(values[t + 4, i])
                + f * _real(values[t + 5, i])
                + g * _real(values[t + 6, i])
                + h * _real(values[t + 7, i])
            )
        t += 8
        at += 8
    while t < last:
        a = weights[at]
        for i in range(dim):
            out[i] += a * _real(values[t, i])
        t += 1
        at += 1


@njit(inline="always", fastmath=True)
def _soften(scores: Any, softcap: Any) -> Any:
    """Scores to e^(score − the largest), capped before where there is a cap; returns their sum."""
    if softcap > _ZERO:
        for t in range(len(scores)):
            scores[t] = softcap * _tanh(scores[t] / softcap)
    top = scores[0]
    for t in range(len(scores)):
        top = max(top, scores[t])
    total = _ZERO
    for t in range(len(scores)):
        weight = exponential(scores[t] - top)
        scores[t] = weight
        total += weight
    return total


@njit(inline="always", fastmath=True)
def _rescale(scores: Any, at: int, scales: Any, first: int, last: int) -> None:
    """By what INT8 keys or values of [first, last) of a block were divided by; of no INT8 there
    are none."""
    if scales.size:
        for t in range(last - first):
            scores[at + t] *= scales[first + t]


@njit(inline="always")
def _scales_of(scales: Any, side: int, block: int, head: int) -> Any:
    return scales[side, block, head] if scales.size else scales[:0, 0, 0, 0]


def _prefetching(typing_context: Any, array: Any, at: Any) -> Any:
    """Ask for the cache line of a contiguous array's element, by its place in memory order."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        made = context.make_array(signature.args[0])(context, builder, arguments[0])
        byte = ir.IntType(8).as_pointer()
        place = builder.bitcast(builder.gep(made.data, [arguments[1]]), byte)
        numbers = [ir.IntType(32)] * 3
        kind = ir.FunctionType(ir.VoidType(), [byte, *numbers])
        name = "llvm.prefetch.p0i8"
        ask = cgutils.get_or_insert_function(builder.module, kind, name)  # type: ignore[no-untyped-call]  # no types
        to_read, keep, of_data = (ir.Constant(ir.IntType(32), x) for x in (0, 3, 1))
        builder.call(ask, [place, to_read, keep, of_data])
        return context.get_dummy_value()

    return types.void(array, types.intp), code


_prefetch: Any = intrinsic(_prefetching)


@njit(inline="always")
def _fetch(block: Any) -> None:
    """All lines of a head's block, which is on its way while another is computed with."""
    for at in range(0, block.size, _LINE_BYTES // block.itemsize):
        _prefetch(block, at)


def _attend(
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
    """out[places[r]] for every row r: its query over its own context, causally.

    data [2, blocks, kv_heads, block_tokens, dim]; scales [2, blocks, kv_heads, block_tokens] of an
    INT8 layer, else empty; tables [sequences, blocks at most]; owners [rows], of which sequence;
    positions [rows]; places [rows], in q and out [Σ tokens, heads, dim], float32. window and
    softcap 0: none.
    """
    block_tokens, dim, kv_heads = data.shape[3], q.shape[2], data.shape[2]
    group = q.shape[1] // kv_heads
    for number in prange(len(positions) * kv_heads):
        row, kv_head = number // kv_heads, number % kv_heads
        table, place, head = tables[owners[row]], places[row], kv_head * group
        end = positions[row] + 1
        start = max(0, end - window) if window > 0 else 0
        scores, made = np.empty((group, end - start), np.float32), np.zeros(dim, np.float32)
        queries = q[place, head : head + group] * scale
        for index in range(start // block_tokens, (end - 1) // block_tokens + 1):
            block, origin = table[index], index * block_tokens
            first, last = max(start - origin, 0), min(end - origin, block_tokens)
            at = origin + first - start
            keys = data[0, block, kv_head]
            if origin + block_tokens < end:
                _fetch(data[0, table[index + 1], kv_head])
            _fetch(data[1, block, kv_head])
            for g in range(0, group - 1, 2):
                one, two = queries[g], queries[g + 1]
                _dots_of_two(one, two, keys, first, last, scores[g], scores[g + 1], at)
            if group % 2:
                _dots(queries[group - 1], keys, first, last, scores[group - 1], at)
            for g in range(group):
                divisors = _scales_of(scales, 0, block, kv_head)
                _rescale(scores[g], at, divisors, first, last)
        for g in range(group):
            total = _soften(scores[g], softcap)
            made[:] = _ZERO
            for index in range(start // block_tokens, (end - 1) // block_tokens + 1):
                block, origin = table[index], index * block_tokens
                first, last = max(start - origin, 0), min(end - origin, block_tokens)
                at = origin + first - start
                _rescale(scores[g], at, _scales_of(scales, 1, block, kv_head), first, last)
                _add(scores[g], at, data[1, block, kv_head], first, last, made)
            for i in range(dim):
                out[place, head + g, i] = made[i] / total


attend_alone = njit(_attend, fastmath=True, nogil=True, cache=True)
attend_together = njit(_attend, fastmath=True, nogil=True, cache=True, parallel=True)


@njit(nogil=True, cache=True)
def store(side: Any, slots: Any, x: Any) -> None:
    """x [Σ tokens, kv_heads, dim] to side [blocks, kv_heads, block_tokens, dim], of one type."""
    block_tokens = side.shape[2]
    for token in range(len(slots)):
        block, offset = slots[token] // block_tokens, slots[token] % block_tokens
        for head in range(x.shape[1]):
            for i in range(x.shape[2]):
                side[block, head, offset, i] = x[token, head, i]


@njit(nogil=True, cache=True)
def store_int8(
    side: Any, scales: Any, slots: Any, x: Any, least_scale: Any, largest_scale: Any
) -> None:
    """The same into int8, symmetric per (token, head): as `torch_paging.quantize`, bit for bit.
    scales [blocks, kv_heads, block_tokens]."""
    block_tokens = side.shape[2]
    for token in range(len(slots)):
        block, offset = slots[token] // block_tokens, slots[token] % block_tokens
        for head in range(x.shape[1]):
            largest = _ZERO
            for i in range(x.shape[2]):
                largest = max(largest, abs(_real(x[token, head, i])))
            scale = min(max(largest / _INT8_MAX, least_scale), largest_scale)
            for i in range(x.shape[2]):
                code = np.rint(_real(x[token, head, i]) / scale)
                side[block, head, offset, i] = np.int8(min(max(code, -_INT8_MAX), _INT8_MAX))
            scales[block, head, offset] = scale if largest > _ZERO else _ZERO


def compilations() -> int:
    """How many of these this process has compiled, because they were not on disk."""
    kernels = (attend_alone, attend_together, store, store_int8)
    return sum(sum(kernel.stats.cache_misses.values()) for kernel in kernels)
