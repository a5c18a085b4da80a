"""The decoding rows' half of a step: their tables on the device, their splits, their launches."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from services.worker.kernels.cuda.decode import append_blocks, decode, join
from services.worker.kernels.cuda.device import Paged, products, send
from services.worker.kernels.cuda.sizes import decode_tiles, power_of_two
from services.worker.kernels.cuda.work import items_of, splits_of
from services.worker.kernels.interface import AttentionOptions
from services.worker.requests.batch import DecodeRows, Ints

APPEND_ROWS = 128
JOIN_NUMBERS = 4096  # of partial outputs, taken at once
ALIGNED = 64  # numbers


@dataclass(frozen=True, slots=True)
class _Splits:
    """`counts` splits a row, and the grid made of them."""

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
        self._position = -1  # of the first row, when tables were last brought up to date
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

    def _split(self, window: int | None, tile: int, heads: int) -> _Splits:
        """This step's splits; the grid of the last step, while it still fits."""
        key = (window, tile, heads)
        if key not in self._fresh:
            self._fresh.add(key)
            counts = splits_of(self._lengths, window, tile, heads, self._processors)
            kept = self._splits.get(key)
            if kept is None or not np.array_equal(kept.counts, counts):
                items, ranges = send(items_of(counts), self._device)
                self._splits[key] = _Splits(counts, items, ranges)
        return self._splits[key]

    def _partials(self, items: int, heads: int, head_dim: int) -> tuple[Tensor, ...]:
        """Room for partial outputs, tops and totals, used again by every layer in turn."""
        rows = -(-items * heads // ALIGNED) * ALIGNED
        needed = rows * (head_dim + 2)
        if needed > len(self._scratch):
            self._scratch = torch.empty(2 * needed, device=self._device)
        outputs = rows * head_dim
        return (
            self._scratch[:outputs],
            self._scratch[outputs : outputs + rows],
            self._scratch[outputs + rows : needed],
        )

    def attend(
        self, paged: Paged, kv_heads: int, q: Tensor, out: Tensor, options: AttentionOptions
    ) -> None:
        """Rows 0 … of q, into the same rows of `out`."""
        heads, head_dim = q.shape[1:]
        group, dim = heads // kv_heads, power_of_two(head_dim)
        sizes = decode_tiles(group, head_dim, q.dtype, paged.pointers[0].dtype)
        head_tiles = -(-group // sizes.queries)
        splits = self._split(options.window, sizes.keys, kv_heads * head_tiles)
        partials = self._partials(splits.total if splits.any_split else 0, heads, head_dim)
        scores, outputs = products(q.dtype, paged.int8)
        decode[(splits.total * kv_heads * head_tiles,)](
            q, out, *partials, splits.items, self._newest, self._tables, self._width,
            *paged.pointers, *q.stride()[:2], *out.stride()[:2], *paged.strides, options.scale,
            KV_HEADS=kv_heads, GROUP=group, HEAD_TILES=head_tiles,
            WINDOW=options.window or 0, SOFTCAP=options.softcap or 0.0, INT8=paged.int8,
            BLOCK_TOKENS=self._block_tokens, ROWS=sizes.queries, TILE=sizes.keys,
            HEAD_DIM=head_dim, DIM=dim, QK=scores, PV=outputs,
            num_warps=sizes.num_warps, num_stages=sizes.num_stages,
        )  # fmt: skip
        if splits.any_split:
            join[(len(splits.counts) * heads,)](
                out, *partials, splits.ranges, *out.stride()[:2],
                HEADS=heads, HEAD_DIM=head_dim, DIM=dim, SPLITS=JOIN_NUMBERS // dim,
                num_warps=4,
            )  # fmt: skip
