# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: N803, RET505 - Triton's compiler wants static branches in full
"""The loop of a query tile over tiles of keys and values, for decode and prefill.

The online softmax of FlashAttention-2 (Dao 2023, algorithm 1), in base 2. The rows of a query tile
are all query heads of one key head, so that keys and values are loaded once for all of them.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def small_int(x):
    """int8 → float32, exactly: sets x + 128 into the mantissa of 2²³, then subtracts 2²³ + 128. The
    conversion instruction has a quarter of this rate, less than the memory's."""
    bits = (x.to(tl.int32) & 0xFF) ^ 0x4B000080
    return bits.to(tl.float32, bitcast=True) - 8388736.0


@triton.jit
def tanh(x):
    """tanh; near 0 by the polynomial of Cephes (tanhf.c), because 1 − 2/(e²ˣ + 1) cancels there."""
    z = x * x
    near = -5.70498872745e-3 * z + 2.06390887954e-2
    near = near * z - 5.37397155531e-2
    near = near * z + 1.33314422036e-1
    near = near * z - 3.33332819422e-1
    near = near * z * x + x
    size = tl.abs(x)
    far = 1.0 - 2.0 / (tl.exp2(size * (2.0 * LOG2_E)) + 1.0)
    far = tl.where(x < 0, -far, far)
    return tl.where(size < 0.625, near, far)


@triton.jit
def fetch(pointers, mask, GUARDED: tl.constexpr):
    """Loads a tile. GUARDED: masked elements read as 0. Unwritten memory may hold NaN, and 0 · NaN
    is NaN."""
    if GUARDED:
        return tl.load(pointers, mask=mask, other=0)
    else:
        return tl.load(pointers)


@triton.jit
def visible(scores, n, positions, WINDOW: tl.constexpr):
    """Sets scores of keys n that the query at `positions` does not see to −inf."""
    seen = n[None, :] <= positions[:, None]
    if WINDOW > 0:
        seen = seen & (n[None, :] > positions[:, None] - WINDOW)
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def scaled(scores, scale, SOFTCAP: tl.constexpr):
    """Scaled scores in base 2, capped if SOFTCAP is not 0."""
    if SOFTCAP > 0:
        return tanh(scores * (scale / SOFTCAP)) * (SOFTCAP * LOG2_E)
    else:
        return scores * (scale * LOG2_E)


@triton.jit
def walk(
    q,  # [rows, DIM] of QK's type
    positions,  # [rows] of the queries in their sequence
    output,  # [rows, DIM] float32: Σ p·v so far
    top,  # [rows] highest score so far, in base 2
    total,  # [rows] Σ p so far
    first,  # tiles [first, last)
    last,
    length,  # tokens of the sequence that are stored
    keys,  # pointers to the head's slots of block 0
    values,
    key_scales,
    value_scales,
    table,  # pointer to the sequence's blocks
    block_stride,
    token_stride,
    scales_stride,
    scale,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    SOFTCAP: tl.constexpr,  # 0: none
    INT8: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    QK: tl.constexpr,  # types of the products
    PV: tl.constexpr,
):
    """Adds tiles [first, last) of TILE keys to the running softmax.

    Without MASKED, every key of these tiles must be stored and visible to every row.
    """
    d = tl.arange(0, DIM)
    guarded: tl.constexpr = MASKED or HEAD_DIM != DIM
    # Table entries are loaded a tile ahead, so that loads of keys and values do not wait for them.
    # The compiler then pipelines as many tiles as there are stages.
    following = first * TILE + tl.arange(0, TILE)
    coming = tl.load(table + following // BLOCK_TOKENS, mask=following < length, other=0)
    for tile in tl.range(first, last):
        n = tile * TILE + tl.arange(0, TILE)
        stored = n < length
        block = coming.to(tl.int64)
        slot = block * block_stride + (n % BLOCK_TOKENS) * token_stride
        following = n + TILE
        coming = tl.load(table + following // BLOCK_TOKENS, mask=following < length, other=0)

        here = slot[None, :] + d[:, None]
        k = fetch(keys + here, stored[None, :] & (d < HEAD_DIM)[:, None], guarded)
        if INT8:
            scale_at = block * scales_stride + n % BLOCK_TOKENS
            key_scale = fetch(key_scales + scale_at, stored, MASKED)
            value_scale = fetch(value_scales + scale_at, stored, MASKED)
            k = small_int(k)
        scores = tl.dot(q, k.to(QK), input_precision="ieee")
        if INT8:
            scores = scores * key_scale[None, :]
        scores = scaled(scores, scale, SOFTCAP)
        if MASKED:
            scores = visible(scores, n, positions, WINDOW)

        higher = tl.maximum(top, tl.max(scores, 1))
        base = higher
        if MASKED:  # for a row without a visible key so far, −inf − −inf would be NaN
            base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(weights, 1)
        output = output * shrink[:, None]
        top = higher

        here = slot[:, None] + d[None, :]
        v = fetch(values + here, stored[:, None] & (d < HEAD_DIM)[None, :], guarded)
        if INT8:
            v = small_int(v)
            weights = weights * value_scale[None, :]
        output = tl.dot(weights.to(PV), v.to(PV), acc=output, input_precision="ieee")
    return output, top, total
