# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: N803 - what a kernel is compiled for is written large
"""Copies blocks between a layer and a staging buffer, bit for bit or as INT8 for host memory.

A program copies one (block, keys or values, head): BLOCK_TOKENS by HEAD_DIM numbers.
"""

import triton
import triton.language as tl

from services.worker.kernels.cuda.rounding import narrow, narrow_up, nearest, widen

# A range that could overflow float32 is computed from halved numbers.
WIDE = tl.constexpr(1e38)


@triton.jit
def place(kv_heads):
    """(index into the list of blocks, 0 for keys or 1 for values, head) of this program."""
    pid = tl.program_id(0)
    return (pid // (2 * kv_heads)).to(tl.int64), (pid // kv_heads) % 2, pid % kv_heads


@triton.jit(do_not_specialize_on_alignment=["blocks"])
def copy(
    source,
    target,
    source_scales,
    target_scales,
    blocks,  # [n]
    kv_heads,
    source_block, source_kv, source_head, source_token,  # strides
    target_block, target_kv, target_head, target_token,
    source_scales_block, source_scales_kv, source_scales_head, source_scales_token,
    target_scales_block, target_scales_kv, target_scales_head, target_scales_token,
    GATHER: tl.constexpr,  # `blocks` are those of the source, else of the target
    SCALES: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
):  # fmt: skip
    """Copies blocks bit for bit."""
    index, kv, head = place(kv_heads)
    block = tl.load(blocks + index).to(tl.int64)
    if GATHER:
        here, there = block, index
    else:
        here, there = index, block
    t = tl.arange(0, TOKENS)
    d = tl.arange(0, DIM)
    real = (t < BLOCK_TOKENS)[:, None] & (d < HEAD_DIM)[None, :]
    source += here * source_block + kv * source_kv + head * source_head
    target += there * target_block + kv * target_kv + head * target_head
    x = tl.load(source + t[:, None] * source_token + d[None, :], mask=real)
    tl.store(target + t[:, None] * target_token + d[None, :], x, mask=real)
    if SCALES:
        source_scales += here * source_scales_block + kv * source_scales_kv
        source_scales += head * source_scales_head
        target_scales += there * target_scales_block + kv * target_scales_kv
        target_scales += head * target_scales_head
        scale = tl.load(source_scales + t * source_scales_token, mask=t < BLOCK_TOKENS)
        tl.store(target_scales + t * target_scales_token, scale, mask=t < BLOCK_TOKENS)


@triton.jit(do_not_specialize_on_alignment=["blocks", "filled"])
def quantize(
    source,  # the layer
    target,  # int8
    ranges,
    blocks,  # [n]
    filled,  # [n]
    kv_heads,
    source_block, source_kv, source_head, source_token,  # strides
    target_block, target_kv, target_head, target_token,
    ranges_block, ranges_kv, ranges_head, ranges_step,
    BLOCK_TOKENS: tl.constexpr,
    TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """Quantizes blocks by λ and min of each channel over the filled tokens. Tokens after these are
    stored as min."""
    index, kv, head = place(kv_heads)
    block = tl.load(blocks + index).to(tl.int64)
    tokens = tl.load(filled + index)
    t = tl.arange(0, TOKENS)
    d = tl.arange(0, DIM)
    channel = d < HEAD_DIM
    counts = (t < tokens)[:, None] & channel[None, :]
    source += block * source_block + kv * source_kv + head * source_head
    x = widen(tl.load(source + t[:, None] * source_token + d[None, :], mask=counts, other=0))
    low = tl.min(tl.where(counts, x, float("inf")), 0)
    high = tl.max(tl.where(counts, x, float("-inf")), 0)
    low = tl.where(channel, low, 0.0)
    high = tl.where(channel, high, 0.0)

    wide = high * 0.5 - low * 0.5 > WIDE
    part = tl.where(wide, 0.5, 1.0)
    whole = tl.where(wide, 2.0, 1.0)
    spread = high * part - low * part
    step = tl.div_rn(spread, tl.zeros_like(spread) + 255.0)
    native_step = narrow_up(step * whole, step * 255.0 < spread, NATIVE)
    step = widen(native_step) * part

    divisor = tl.where(step > 0, step, 1.0)
    above = x * part[None, :] - (low * part)[None, :]
    steps = nearest(tl.div_rn(above, divisor[None, :] + tl.zeros_like(above)))
    steps = tl.minimum(tl.maximum(steps, 0.0), 255.0)
    steps = tl.where(counts, steps, 0.0)
    at = index * target_block + kv * target_kv + head * target_head
    full = (t < BLOCK_TOKENS)[:, None] & channel[None, :]
    tl.store(
        target + at + t[:, None] * target_token + d[None, :],
        (steps - 128.0).to(tl.int8),
        mask=full,
    )
    at = index * ranges_block + kv * ranges_kv + head * ranges_head
    tl.store(ranges + at + d, native_step, mask=channel)
    tl.store(ranges + at + ranges_step + d, narrow(low, NATIVE), mask=channel)


@triton.jit(do_not_specialize_on_alignment=["blocks"])
def dequantize(
    source,  # int8
    target,  # the layer
    ranges,
    blocks,  # [n]
    kv_heads,
    source_block, source_kv, source_head, source_token,  # strides
    target_block, target_kv, target_head, target_token,
    ranges_block, ranges_kv, ranges_head, ranges_step,
    BLOCK_TOKENS: tl.constexpr,
    TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    index, kv, head = place(kv_heads)
    block = tl.load(blocks + index).to(tl.int64)
    t = tl.arange(0, TOKENS)
    d = tl.arange(0, DIM)
    channel = d < HEAD_DIM
    full = (t < BLOCK_TOKENS)[:, None] & channel[None, :]
    at = index * ranges_block + kv * ranges_kv + head * ranges_head
    step = widen(tl.load(ranges + at + d, mask=channel, other=0))
    low = widen(tl.load(ranges + at + ranges_step + d, mask=channel, other=0))
    at = index * source_block + kv * source_kv + head * source_head
    x = tl.load(source + at + t[:, None] * source_token + d[None, :], mask=full, other=0)

    wide = step > WIDE / 128.0
    part = tl.where(wide, 0.5, 1.0)
    whole = tl.where(wide, 2.0, 1.0)
    steps = x.to(tl.float32) + 128.0
    half = steps * (step * part)[None, :] + (low * part)[None, :]
    most = 3.4028234663852886e38 * part
    half = tl.minimum(tl.maximum(half, -most[None, :]), most[None, :])
    target += block * target_block + kv * target_kv + head * target_head
    tl.store(
        target + t[:, None] * target_token + d[None, :],
        narrow(half * whole[None, :], NATIVE),
        mask=full,
    )
