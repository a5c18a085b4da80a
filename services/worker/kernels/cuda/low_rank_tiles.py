# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: N803 - what a kernel is compiled for is written large
"""Low-rank products of rows with each one's adapter: down to the ranks, then up to the outputs.

A program computes the rows of one adapter, so that its tiles of down and up are read once for all
of them (Chen et al., "Punica", MLSys 2024, §4). Source of the two steps: SGMV's shrink and expand.
"""

import triton
import triton.language as tl


@triton.jit
def tile_of_rows(rows, starts, slots, ranks, ROWS: tl.constexpr):
    """The program's tile of a group: indices in `rows`, which of them exist, the rows, their slot
    and its rank."""
    group = tl.program_id(0)
    start, end = tl.load(starts + group), tl.load(starts + group + 1)
    slot = tl.load(slots + group)
    at = start + tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    here = at < end
    return at, here, tl.load(rows + at, mask=here, other=0), slot, tl.load(ranks + slot)


@triton.jit
def shrink(
    x,
    down,
    low,  # [adapted rows, parts · most rank], float32
    rows,  # [adapted rows]
    starts,  # [groups + 1] in rows
    slots,  # [groups]
    ranks,  # [slots]
    inputs,
    x_stride,
    down_slot_stride,
    down_stride,
    low_stride,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    INPUTS: tl.constexpr,
    EXACT: tl.constexpr,
):
    """low = x · down of each row. Programs: groups × tiles of ROWS rows × tiles of RANKS."""
    at, here, row, slot, rank = tile_of_rows(rows, starts, slots, ranks, ROWS)
    r = tl.program_id(2) * RANKS + tl.arange(0, RANKS)
    used = r < rank * PARTS
    total = tl.zeros((ROWS, RANKS), tl.float32)
    for first in range(0, inputs, INPUTS):
        i = first + tl.arange(0, INPUTS)
        real = i < inputs
        part = tl.load(
            x + row[:, None] * x_stride + i[None, :], mask=here[:, None] & real[None, :], other=0
        )
        weight = tl.load(
            down + slot * down_slot_stride + r[None, :] * down_stride + i[:, None],
            mask=used[None, :] & real[:, None],
            other=0,
        )
        if EXACT:
            total += tl.dot(part.to(tl.float32), weight.to(tl.float32), input_precision="ieee")
        else:
            total += tl.dot(part, weight)
    tl.store(low + at[:, None] * low_stride + r[None, :], total, mask=here[:, None] & used[None, :])


@triton.jit(do_not_specialize=["part"])
def expand(
    low,
    up,
    out,
    rows,
    starts,
    slots,
    ranks,
    part,
    first_column,
    columns,
    low_stride,
    up_slot_stride,
    up_stride,
    out_stride,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EXACT: tl.constexpr,
):
    """out += low · up for the outputs of a part. Programs: groups × tiles of ROWS rows × tiles of
    COLUMNS outputs."""
    at, here, row, slot, rank = tile_of_rows(rows, starts, slots, ranks, ROWS)
    c = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    real = c < columns
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, rank, RANKS):
        r = first + tl.arange(0, RANKS)
        used = r < rank
        numbers = tl.load(
            low + at[:, None] * low_stride + part * rank + r[None, :],
            mask=here[:, None] & used[None, :],
            other=0,
        )
        weight = tl.load(
            up + slot * up_slot_stride + r[:, None] * up_stride + first_column + c[None, :],
            mask=used[:, None] & real[None, :],
            other=0,
        )
        if EXACT:
            total += tl.dot(numbers, weight.to(tl.float32), input_precision="ieee")
        else:
            total += tl.dot(numbers.to(weight.dtype), weight)
    there = out + row[:, None] * out_stride + first_column + c[None, :]
    inside = here[:, None] & real[None, :]
    before = tl.load(there, mask=inside, other=0).to(tl.float32)
    tl.store(there, (before + total).to(out.dtype.element_ty), mask=inside)
