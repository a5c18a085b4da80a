# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: N803 - what a kernel is compiled for is written large
"""Decode attention: one query per sequence; its context is divided into splits that run in
parallel.

As in flash-decoding (Dao et al. 2023), each split has a separate softmax, and a second kernel joins
the splits. The grid is a list of (row, split, splits), so that a long sequence among short ones
causes no empty thread blocks. In a recorded grid, unused thread blocks return at once.
"""

import triton
import triton.language as tl

from services.worker.kernels.cuda.tiles import walk


@triton.jit(do_not_specialize=["rows", "width"])
def append_blocks(tables, fresh, rows, width, BLOCK_TOKENS: tl.constexpr, ROWS: tl.constexpr):
    """Sets each row's newest block: `fresh` is [2, rows], lengths then blocks."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    length = tl.load(fresh + row, mask=inside, other=1)
    block = tl.load(fresh + rows + row, mask=inside, other=0)
    tl.store(tables + row * width + (length - 1) // BLOCK_TOKENS, block, mask=inside)


@triton.jit(
    do_not_specialize=["rows", "width"],
    do_not_specialize_on_alignment=["positions", "slots"],
)
def follow(
    lengths,  # [rows]
    tables,  # [rows, width]
    positions,  # [rows] of the tokens that are decoded
    slots,  # [rows] where they are stored
    rows,
    width,
    BLOCK_TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Updates each row's length and newest block from memory on the device."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    position = tl.load(positions + row, mask=inside, other=0).to(tl.int32)
    slot = tl.load(slots + row, mask=inside, other=0)
    tl.store(lengths + row, position + 1, mask=inside)
    block = (slot // BLOCK_TOKENS).to(tl.int32)
    tl.store(tables + row * width + position // BLOCK_TOKENS, block, mask=inside)


@triton.jit(do_not_specialize=["width"])
def decode(
    q,
    out,
    partial,  # [items, heads, HEAD_DIM] float32
    tops,  # [items, heads]
    totals,
    items,  # [items, 3]: row, split, splits; 0 splits: unused
    lengths,  # [rows]
    tables,  # [rows, width]
    width,
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
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_TILES: tl.constexpr,
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
    # Programs of adjacent heads read adjacent memory, and have adjacent ids to run together.
    item = tl.program_id(0) // (KV_HEADS * HEAD_TILES)
    part = tl.program_id(0) % (KV_HEADS * HEAD_TILES)
    kv_head = part // HEAD_TILES
    row = tl.load(items + 3 * item)
    split = tl.load(items + 3 * item + 1)
    splits = tl.load(items + 3 * item + 2)
    if splits == 0:
        return  # unused
    length = tl.load(lengths + row)

    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(length - WINDOW, 0) // TILE
    count = (length + TILE - 1) // TILE - begin
    first = begin + count * split // splits
    last = begin + count * (split + 1) // splits

    within = (part % HEAD_TILES) * ROWS + tl.arange(0, ROWS)
    head = kv_head * GROUP + within
    d = tl.arange(0, DIM)
    real = (within < GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    query = q + row.to(tl.int64) * q_token_stride + head[:, None] * q_head_stride + d[None, :]
    queries = tl.load(query, mask=real, other=0).to(QK)
    positions = tl.zeros([ROWS], tl.int32) + (length - 1)
    output = tl.zeros([ROWS, DIM], tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    keys += kv_head * head_stride
    values += kv_head * head_stride
    key_scales += kv_head * scales_head_stride
    value_scales += kv_head * scales_head_stride
    table = tables + row.to(tl.int64) * width

    # Without a window only the row's last tile needs masks.
    whole = first
    if WINDOW == 0:
        whole = tl.minimum(last, length // TILE)
        output, top, total = walk(
            queries, positions, output, top, total, first, whole, length,
            keys, values, key_scales, value_scales, table,
            block_stride, token_stride, scales_block_stride, scale,
            False, WINDOW, SOFTCAP, INT8, BLOCK_TOKENS, TILE, HEAD_DIM, DIM, QK, PV,
        )  # fmt: skip
    output, top, total = walk(
        queries, positions, output, top, total, whole, last, length,
        keys, values, key_scales, value_scales, table,
        block_stride, token_stride, scales_block_stride, scale,
        True, WINDOW, SOFTCAP, INT8, BLOCK_TOKENS, TILE, HEAD_DIM, DIM, QK, PV,
    )  # fmt: skip
    if splits == 1:
        there = row.to(tl.int64) * out_token_stride + head[:, None] * out_head_stride
        output = output / total[:, None]
        tl.store(out + there + d[None, :], output.to(out.dtype.element_ty), mask=real)
    else:
        at = item.to(tl.int64) * (KV_HEADS * GROUP) + head
        tl.store(partial + at[:, None] * HEAD_DIM + d[None, :], output, mask=real)
        tl.store(tops + at, top, mask=within < GROUP)
        tl.store(totals + at, total, mask=within < GROUP)


@triton.jit
def join(
    out,
    partial,
    tops,
    totals,
    ranges,  # [rows, 2]: the row's first item, its splits
    out_token_stride,
    out_head_stride,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    SPLITS: tl.constexpr,  # loaded together
):
    """Joins one row and head: its splits' outputs, weighted by their shares of the softmax."""
    row = tl.program_id(0) // HEADS
    head = tl.program_id(0) % HEADS
    item = tl.load(ranges + 2 * row).to(tl.int64)
    splits = tl.load(ranges + 2 * row + 1)
    if splits == 1:
        return  # `decode` has stored the output
    d = tl.arange(0, DIM)
    real = d < HEAD_DIM
    output = tl.zeros([DIM], tl.float32)
    top = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    for start in tl.range(0, splits, SPLITS):
        s = start + tl.arange(0, SPLITS)
        at = (item + s) * HEADS + head
        split_top = tl.load(tops + at, mask=s < splits, other=float("-inf"))
        split_total = tl.load(totals + at, mask=s < splits, other=0)
        part = tl.load(
            partial + at[:, None] * HEAD_DIM + d[None, :],
            mask=(s < splits)[:, None] & real[None, :],
            other=0,
        )
        higher = tl.maximum(top, tl.max(split_top, 0))
        weights = tl.exp2(split_top - higher)
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.sum(weights * split_total, 0)
        output = output * shrink + tl.sum(weights[:, None] * part, 0)
        top = higher
    there = row.to(tl.int64) * out_token_stride + head * out_head_stride
    tl.store(out + there + d, (output / total).to(out.dtype.element_ty), mask=real)
