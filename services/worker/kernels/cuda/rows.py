"""Decode attention of a step: tables on the device, splits, and launches."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from services.worker.kernels.cuda.decode import append_blocks, decode, join
from services.worker.kernels.cuda.device import Paged, products, send
from services.worker.kernels.cuda.tile_sizes import Tiles, decode_tiles, power_of_two
from services.worker.kernels.cuda.work_split import count_splits, list_items
from services.worker.kernels.interface import AttentionOptions
from services.worker.requests.types.batch import DecodeRows, Ints

APPEND_ROWS = 128
JOIN_NUMBERS = 4096  # numbers of partial outputs loaded together
ALIGNED = 64  # numbers


@dataclass(frozen=True, slots=True)
class HeadTiling:
    """The division of a layer's heads into thread blocks, on which the splits of its rows
    depend."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None
    tiles: Tiles

    @classmethod
    def plan(cls, q: Tensor, kv_heads: int, paged: Paged, window: int | None) -> "HeadTiling":
        heads, head_dim = q.shape[1:]
        tiles = decode_tiles(heads // kv_heads, head_dim, q.dtype, paged.pointers[0].dtype)
        return cls(heads, kv_heads, head_dim, window, tiles)

    @property
    def head_tiles(self) -> int:
        """Tiles of query heads per key head."""
        return -(-self.heads // self.kv_heads // self.tiles.queries)

    @property
    def blocks_per_split(self) -> int:
        """Thread blocks per split."""
        return self.kv_heads * self.head_tiles

    @property
    def work(self) -> tuple[int | None, int, int]:
        """Layers with equal `work` have equal splits."""
        return self.window, self.tiles.keys, self.blocks_per_split


@dataclass(frozen=True, slots=True)
class Contexts:
    """Tokens and blocks of each row, [rows] and [rows, width]."""

    lengths: Tensor
    tables: Tensor
    width: int


@dataclass(frozen=True, slots=True)
class Grid:
    """The grid of a launch. `items` are `count` triples (row, split, splits), `ranges` are (first
    item, splits) of each row. `rows` is 0 if no row is split. `partials` is memory for the results
    of splits."""

    items: Tensor
    count: int
    ranges: Tensor
    rows: int
    partials: tuple[Tensor, Tensor, Tensor]


def padded_size(items: int, heads: int) -> int:
    """Partial results of this many items, rounded up to the alignment."""
    return -(-items * heads // ALIGNED) * ALIGNED


def split_scratch(scratch: Tensor, room: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, maxima and totals; `scratch` has at least room · (head_dim + 2) numbers."""
    outputs = room * head_dim
    return (
        scratch[:outputs],
        scratch[outputs : outputs + room],
        scratch[outputs + room : outputs + 2 * room],
    )


def launch(
    q: Tensor,
    out: Tensor,
    paged: Paged,
    cut: HeadTiling,
    contexts: Contexts,
    grid: Grid,
    options: AttentionOptions,
    block_tokens: int,
) -> None:
    """Computes attention of the first rows of q into the same rows of `out`."""
    tiles, dim = cut.tiles, power_of_two(cut.head_dim)
    scores, outputs = products(q.dtype, paged.int8)
    decode[(grid.count * cut.blocks_per_split,)](
        q, out, *grid.partials, grid.items, contexts.lengths, contexts.tables, contexts.width,
        *paged.pointers, *q.stride()[:2], *out.stride()[:2], *paged.strides, options.scale,
        KV_HEADS=cut.kv_heads, GROUP=cut.heads // cut.kv_heads, HEAD_TILES=cut.head_tiles,
        WINDOW=options.window or 0, SOFTCAP=options.softcap or 0.0, INT8=paged.int8,
        BLOCK_TOKENS=block_tokens, ROWS=tiles.queries, TILE=tiles.keys,
        HEAD_DIM=cut.head_dim, DIM=dim, QK=scores, PV=outputs,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    if grid.rows:
        join[(grid.rows * cut.heads,)](
            out, *grid.partials, grid.ranges, *out.stride()[:2],
            HEADS=cut.heads, HEAD_DIM=cut.head_dim, DIM=dim, SPLITS=JOIN_NUMBERS // dim,
            num_warps=4,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Splits:
    """The number of splits of each row (`counts`), and their grid."""

    counts: Ints
    items: Tensor
    ranges: Tensor

    @property
    def total(self) -> int:
        return int(self.counts.sum())

    @property
    def any_split(self) -> bool:
        return self.total > len(self.counts)


class RowsAttention:
    """Decode attention for the rows of the latest `prepare`.

    Tables stay on the device while the same rows decode: a step sends each row's length and its
    newest block, the only one that can have changed.
    """

    def __init__(self, block_tokens: int, device: torch.device, processors: int):
        self._block_tokens = block_tokens
        self._device = device
        self._processors = processors
        self._rows: DecodeRows | None = None
        self._position = -1  # of the first row at the last update of the tables
        self._splits: dict[tuple[int | None, int, int], _Splits] = {}
        self._fresh: set[tuple[int | None, int, int]] = set()
        self._scratch = torch.empty(0, device=device)

    def prepare(self, rows: DecodeRows) -> None:
        if not len(rows):
            self._rows = None
            return
        self._lengths = rows.positions + 1
        newest = rows.tables[np.arange(len(rows)), rows.positions // self._block_tokens]
        (self._newest,) = send([np.stack([self._lengths, newest]).astype(np.int32)], self._device)
        position = int(rows.positions[0])
        same = rows is self._rows and rows.tables.shape[1] == self._width
        if not same or not 0 <= position - self._position <= 1:
            self._send_tables(rows)
        else:
            self._append(len(rows))
        self._position = position
        self._fresh.clear()

    def _send_tables(self, rows: DecodeRows) -> None:
        self._rows = rows
        self._width = rows.tables.shape[1]
        (self._tables,) = send([rows.tables.astype(np.int32)], self._device)
        self._splits.clear()

    def _append(self, rows: int) -> None:
        append_blocks[(-(-rows // APPEND_ROWS),)](
            self._tables, self._newest, rows, self._width,
            BLOCK_TOKENS=self._block_tokens, ROWS=APPEND_ROWS,
        )  # fmt: skip

    def _split(self, cut: HeadTiling) -> _Splits:
        """This step's splits; the previous step's grid if it is equal."""
        key = cut.work
        if key not in self._fresh:
            self._fresh.add(key)
            counts = count_splits(self._lengths, *key, self._processors)
            kept = self._splits.get(key)
            if kept is None or not np.array_equal(kept.counts, counts):
                items, ranges = send(list_items(counts), self._device)
                self._splits[key] = _Splits(counts, items, ranges)
        return self._splits[key]

    def _partials(self, items: int, cut: HeadTiling) -> tuple[Tensor, Tensor, Tensor]:
        """Memory for partial results, which all layers share."""
        room = padded_size(items, cut.heads)
        needed = room * (cut.head_dim + 2)
        if needed > len(self._scratch):
            self._scratch = torch.empty(2 * needed, device=self._device)
        return split_scratch(self._scratch, room, cut.head_dim)

    def attend(
        self, paged: Paged, kv_heads: int, q: Tensor, out: Tensor, options: AttentionOptions
    ) -> None:
        """Computes attention of the first rows of q into the same rows of `out`."""
        cut = HeadTiling.plan(q, kv_heads, paged, options.window)
        splits = self._split(cut)
        partials = self._partials(splits.total if splits.any_split else 0, cut)
        rows = len(splits.counts) if splits.any_split else 0
        grid = Grid(splits.items, splits.total, splits.ranges, rows, partials)
        contexts = Contexts(self._newest, self._tables, self._width)
        launch(q, out, paged, cut, contexts, grid, options, self._block_tokens)
