"""Divides a step's attention into thread blocks that fill the device."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from services.worker.requests.types.batch import Ints, PrefillChunk

Words = NDArray[np.int32]

# Thread blocks per multiprocessor and launch: with eight rounds of two at a time, the last round,
# which is half empty on average, costs at most a sixteenth.
BLOCKS_PER_PROCESSOR = 16
# Tiles of a split: with fewer, joining the splits costs more than they save.
MIN_TILES = 4


def count_splits(lengths: Ints, window: int | None, tile: int, heads: int, processors: int) -> Ints:
    """The number of splits of each row's visible context, at least 1. O(rows).

    `heads` is the number of thread blocks per split.
    """
    hidden = np.zeros_like(lengths) if window is None else np.maximum(lengths - window, 0)
    tiles = -(-lengths // tile) - hidden // tile
    wanted = BLOCKS_PER_PROCESSOR * processors
    each = max(MIN_TILES, -(-int(tiles.sum()) * heads // wanted))
    return np.asarray(-(-tiles // each))


def spare_splits(heads: int, processors: int) -> int:
    """The largest number of splits beyond one per row that `count_splits` returns for any rows: all
    but the last split of a row have the full size, and there are at most this many of those."""
    return BLOCKS_PER_PROCESSOR * processors // heads


def list_items(splits: Ints) -> tuple[Words, Words]:
    """The grid: triples (row, split, splits of the row), and for each row (first item, splits)."""
    firsts = np.cumsum(splits) - splits
    rows = np.repeat(np.arange(len(splits)), splits)
    number = np.arange(len(rows)) - firsts[rows]
    items = np.stack([rows, number, splits[rows]], 1).astype(np.int32)
    return items, np.stack([firsts, splits], 1).astype(np.int32)


def list_tiles(chunks: Sequence[PrefillChunk], row: int, tokens: int) -> tuple[Words, Words]:
    """Tiles of up to `tokens` queries, longest contexts first: (row of the first query, its
    position, queries, start of the table); and the concatenated tables of all chunks.

    `row` is that of the first chunk in the packed queries.
    """
    sizes = np.array([chunk.tokens for chunk in chunks])
    starts = np.array([chunk.start for chunk in chunks])
    rows = row + np.cumsum(sizes) - sizes
    widths = np.array([len(chunk.table) for chunk in chunks])
    tables = np.cumsum(widths) - widths
    counts = -(-sizes // tokens)
    owner = np.repeat(np.arange(len(chunks)), counts)
    offsets = (np.arange(len(owner)) - (np.cumsum(counts) - counts)[owner]) * tokens
    tiles = np.stack(
        [rows[owner] + offsets, starts[owner] + offsets,
         np.minimum(sizes[owner] - offsets, tokens), tables[owner]], 1
    )  # fmt: skip
    order = np.argsort(-tiles[:, 1], kind="stable")
    blocks = np.concatenate([chunk.table for chunk in chunks])
    return tiles[order].astype(np.int32), blocks.astype(np.int32)
