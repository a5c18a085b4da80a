"""Cutting a step's attention into pieces that fill the device: which thread block does what."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from services.worker.requests.types.batch import Ints, PrefillChunk

Words = NDArray[np.int32]

# Thread blocks a multiprocessor gets in the course of a launch: with eight rounds of two at a
# time, the last round, which runs half empty, costs no more than a sixteenth.
BLOCKS_PER_PROCESSOR = 16
# Fewer tiles than this in a split, and joining it costs more than what it hides.
MIN_TILES = 4


def splits_of(lengths: Ints, window: int | None, tile: int, heads: int, processors: int) -> Ints:
    """How many splits each row's visible context is cut into, 1 at least; O(rows).

    `heads` is how many thread blocks take each split side by side.
    """
    hidden = np.zeros_like(lengths) if window is None else np.maximum(lengths - window, 0)
    tiles = -(-lengths // tile) - hidden // tile
    wanted = BLOCKS_PER_PROCESSOR * processors
    each = max(MIN_TILES, -(-int(tiles.sum()) * heads // wanted))
    return np.asarray(-(-tiles // each))


def spare_splits(heads: int, processors: int) -> int:
    """How many more splits than rows `splits_of` makes at most, whatever the rows: each but a row's
    last is of `each` tiles, and of those there are so many in all."""
    return BLOCKS_PER_PROCESSOR * processors // heads


def items_of(splits: Ints) -> tuple[Words, Words]:
    """The grid: (row, split, splits of the row), and of each row (its first item, splits)."""
    firsts = np.cumsum(splits) - splits
    rows = np.repeat(np.arange(len(splits)), splits)
    number = np.arange(len(rows)) - firsts[rows]
    items = np.stack([rows, number, splits[rows]], 1).astype(np.int32)
    return items, np.stack([firsts, splits], 1).astype(np.int32)


def tiles_of(chunks: Sequence[PrefillChunk], row: int, tokens: int) -> tuple[Words, Words]:
    """Tiles of up to `tokens` queries, (row of the first, its position, queries, start of its
    table), the longest contexts first; and all the chunks' tables, one after another.

    `row` is the first chunk's in the packed queries.
    """
    sizes = np.array([chunk.tokens for chunk in chunks])
    starts = np.array([chunk.start for chunk in chunks])
    rows = row + np.cumsum(sizes) - sizes
    widths = np.array([len(chunk.table) for chunk in chunks])
    tables = np.cumsum(widths) - widths
    counts = -(-sizes // tokens)
    of = np.repeat(np.arange(len(chunks)), counts)
    offsets = (np.arange(len(of)) - (np.cumsum(counts) - counts)[of]) * tokens
    tiles = np.stack(
        [rows[of] + offsets, starts[of] + offsets,
         np.minimum(sizes[of] - offsets, tokens), tables[of]], 1
    )  # fmt: skip
    order = np.argsort(-tiles[:, 1], kind="stable")
    blocks = np.concatenate([chunk.table for chunk in chunks])
    return tiles[order].astype(np.int32), blocks.astype(np.int32)
