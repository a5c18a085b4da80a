# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: N803 - what a kernel is compiled for is written large
"""Prefill attention: all packed chunks of a step, over the blocks of their contexts."""

import triton
import triton.language as tl

from services.worker.kernels.cuda.tiles import walk


@triton.jit
def prefill(
    q,
    out,
    tiles,  # [tiles, 4]: first row of q, its position, tokens, start of its table in `blocks`
    blocks,
    keys,
    values,
    key_scales,
    value_scales,
    q_token_stride,
    q_head_stride,
    out_token_stride,
    out_head_stride,
    block_stride,
    head_stride,
    token_stride,
    scales_block_stride,
    scales_head_stride,
    scale,
    GROUP: tl.constexpr,
    HEAD_TILES: tl.constexpr,
    TILE_HEADS: tl.constexpr,  # heads of a group in a tile; its rows are (token, head)
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    INT8: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    QK: tl.constexpr,
    PV: tl.constexpr,
):
    tile = tiles + 4 * tl.program_id(0)
    kv_head = tl.program_id(1) // HEAD_TILES
    row = tl.load(tile).to(tl.int64)
    position = tl.load(tile + 1)
    tokens = tl.load(tile + 2)
    table = blocks + tl.load(tile + 3)
    length = position + tokens

    m = tl.arange(0, ROWS)
    token = m // TILE_HEADS
    within = (tl.program_id(1) % HEAD_TILES) * TILE_HEADS + m % TILE_HEADS
    head = kv_head * GROUP + within
    d = tl.arange(0, DIM)
    real = ((token < tokens) & (within < GROUP))[:, None] & (d < HEAD_DIM)[None, :]
    query = q + (row + token)[:, None] * q_token_stride + head[:, None] * q_head_stride
    queries = tl.load(query + d[None, :], mask=real, other=0).to(QK)
    positions = position + tl.minimum(token, tokens - 1)

    output = tl.zeros([ROWS, DIM], tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    keys += kv_head * head_stride
    values += kv_head * head_stride
    key_scales += kv_head * scales_head_stride
    value_scales += kv_head * scales_head_stride

    # All rows see all keys of tiles [whole, diagonal). Only the other tiles need masks.
    whole = 0
    diagonal = (position + 1) // TILE
    end = (length + TILE - 1) // TILE
    if WINDOW > 0:
        begin = tl.maximum(position - WINDOW + 1, 0) // TILE
        whole = (tl.maximum(length - WINDOW, 0) + TILE - 1) // TILE
        whole = tl.minimum(whole, diagonal)
        output, top, total = walk(
            queries, positions, output, top, total, begin, whole, length,
            keys, values, key_scales, value_scales, table,
            block_stride, token_stride, scales_block_stride, scale,
            True, WINDOW, SOFTCAP, INT8, BLOCK_TOKENS, TILE, HEAD_DIM, DIM, QK, PV,
        )  # fmt: skip
    output, top, total = walk(
        queries, positions, output, top, total, whole, diagonal, length,
        keys, values, key_scales, value_scales, table,
        block_stride, token_stride, scales_block_stride, scale,
        False, WINDOW, SOFTCAP, INT8, BLOCK_TOKENS, TILE, HEAD_DIM, DIM, QK, PV,
    )  # fmt: skip
    output, top, total = walk(
        queries, positions, output, top, total, diagonal, end, length,
        keys, values, key_scales, value_scales, table,
        block_stride, token_stride, scales_block_stride, scale,
        True, WINDOW, SOFTCAP, INT8, BLOCK_TOKENS, TILE, HEAD_DIM, DIM, QK, PV,
    )  # fmt: skip

    output = output / total[:, None]
    there = (row + token)[:, None] * out_token_stride + head[:, None] * out_head_stride
    tl.store(out + there + d[None, :], output.to(out.dtype.element_ty), mask=real)
