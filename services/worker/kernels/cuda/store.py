# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: N803 - what a kernel is compiled for is written large
"""Stores a step's keys and values into their slots, in the cache's dtype or as INT8."""

import triton
import triton.language as tl

from services.worker.kernels.cuda.rounding import nearest

# A scale below TINY would be denormal and lose precision; 127 times LARGEST is still finite.
TINY = tl.constexpr(1.1754943508222875e-38)
LARGEST = tl.constexpr(2.679e36)


@triton.jit
def as_int8(x):
    """Quantizes x [rows, DIM] to int8 and float32 scales [rows], symmetrically: max|x| becomes
    127."""
    x = x.to(tl.float32)
    largest = tl.max(tl.abs(x), 1)
    scale = tl.div_rn(largest, tl.zeros_like(largest) + 127.0)
    scale = tl.minimum(tl.maximum(scale, TINY), LARGEST)
    steps = nearest(tl.div_rn(x, scale[:, None] + tl.zeros_like(x)))
    steps = tl.minimum(tl.maximum(steps, -127.0), 127.0)
    return steps.to(tl.int8), tl.where(largest > 0, scale, 0.0)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["slots"])
def store(
    k,
    v,
    slots,  # [tokens]
    keys,
    values,
    key_scales,
    value_scales,
    rows,  # tokens · KV_HEADS
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    block_stride,
    head_stride,
    token_stride,
    scales_block_stride,
    scales_head_stride,
    KV_HEADS: tl.constexpr,
    INT8: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
):
    """Each row is a (token, head) pair."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    token = (row // KV_HEADS).to(tl.int64)
    head = row % KV_HEADS
    d = tl.arange(0, DIM)
    real = inside[:, None] & (d < HEAD_DIM)[None, :]
    k_at = token * k_token_stride + head * k_head_stride
    v_at = token * v_token_stride + head * v_head_stride
    key = tl.load(k + k_at[:, None] + d[None, :], mask=real, other=0)
    value = tl.load(v + v_at[:, None] + d[None, :], mask=real, other=0)

    slot = tl.load(slots + token, mask=inside, other=0).to(tl.int64)
    block = slot // BLOCK_TOKENS
    offset = slot % BLOCK_TOKENS
    there = (block * block_stride + head * head_stride + offset * token_stride)[:, None]
    there += d[None, :]
    if INT8:
        key, key_scale = as_int8(key)
        value, value_scale = as_int8(value)
        at = block * scales_block_stride + head * scales_head_stride + offset
        tl.store(key_scales + at, key_scale, mask=inside)
        tl.store(value_scales + at, value_scale, mask=inside)
    tl.store(keys + there, key, mask=real)
    tl.store(values + there, value, mask=real)
