"""Decode attention with launches that can be recorded in a CUDA graph and replayed.

Kernels, grids, pointers and numbers of a graph are constant. The contexts of a step are therefore
passed in memory at fixed addresses. Changed tables and splits are copied there. The device derives
each row's length and newest block from the positions and slots, which the model reads, too. The
grid has room for the largest number of splits of a batch of its size, which is slightly more than
its rows; unused thread blocks return at once.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from services.worker.kernels.cuda.attention import store_tokens
from services.worker.kernels.cuda.decode import follow
from services.worker.kernels.cuda.device import Paged, contiguous_rows, count_processors, send
from services.worker.kernels.cuda.rows import (
    APPEND_ROWS,
    Contexts,
    Grid,
    HeadTiling,
    launch,
    padded_size,
    split_scratch,
)
from services.worker.kernels.cuda.work_split import count_splits, list_items, spare_splits
from services.worker.kernels.interface import AttentionOptions
from services.worker.kv.cache import KVLayer
from services.worker.requests.types.batch import NO_INTS, DecodeRows, Ints, StepBatch


@dataclass(slots=True)
class _Plan:
    """The splits of the rows for one kind of layer: `items` (row, split, splits) and `ranges`
    (first item, splits), flat, for the largest number of rows. `sent` are the splits copied there
    last."""

    cut: HeadTiling
    spare: int
    items: Tensor
    ranges: Tensor
    partials: tuple[Tensor, Tensor, Tensor]
    sent: Ints = field(default_factory=lambda: NO_INTS)


class RecordableDecodes:
    """RecordableAttention on a CUDA device; on the CPU under TRITON_INTERPRET=1.

    For up to `max_rows` rows of `row_blocks` blocks. `processors` is the number of multiprocessors
    to fill, by default all.
    """

    def __init__(
        self,
        block_tokens: int,
        device: torch.device,
        max_rows: int,
        row_blocks: int,
        processors: int | None = None,
    ):
        self._block_tokens = block_tokens
        self._device = device
        self._processors = processors or count_processors(device)
        self._max_rows = max_rows
        self.row_tokens = row_blocks * block_tokens
        lengths = torch.ones(max_rows, dtype=torch.int32, device=device)
        tables = torch.zeros(max_rows, row_blocks, dtype=torch.int32, device=device)
        self._contexts = Contexts(lengths, tables, row_blocks)
        self._plans: dict[tuple[int | None, ...], _Plan] = {}
        self._rows: DecodeRows | None = None
        self._position = -1  # of the first row at the last update of the tables
        self._lengths = NO_INTS
        self._size = 0

    def prepare(self, batch: StepBatch, slots: Tensor) -> None:
        rows = batch.decodes
        self._slots, self._size = slots, len(slots)
        self._lengths = rows.positions + 1
        position = int(rows.positions[0]) if len(rows) else -1
        if rows is not self._rows or not 0 <= position - self._position <= 1:
            self._rows = rows
            self._send_tables(rows)
        self._position = position
        for plan in self._plans.values():
            self._send(plan)

    def begin(self, positions: Tensor) -> None:
        contexts, rows = self._contexts, len(positions)
        follow[(-(-rows // APPEND_ROWS),)](
            contexts.lengths, contexts.tables, positions, self._slots, rows, contexts.width,
            BLOCK_TOKENS=self._block_tokens, ROWS=APPEND_ROWS,
        )  # fmt: skip

    def store(self, layer: KVLayer, k: Tensor, v: Tensor) -> None:
        store_tokens(layer, k, v, self._slots, self._block_tokens)

    def attend(
        self, layer: KVLayer, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions
    ) -> Tensor:
        q, paged = contiguous_rows(q), Paged.from_layer(layer)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        cut = HeadTiling.plan(q, layer.data.shape[2], paged, options.window)
        plan, rows = self._plan(cut), len(q)
        grid = Grid(plan.items, rows + plan.spare, plan.ranges, rows, plan.partials)
        launch(q, out, paged, cut, self._contexts, grid, options, self._block_tokens)
        return out

    def _send_tables(self, rows: DecodeRows) -> None:
        """O(rows · width). Table entries beyond a row's blocks are never read."""
        if not len(rows):
            return
        width = min(rows.tables.shape[1], self._contexts.width)
        (there,) = send([rows.tables[:, :width].astype(np.int32)], self._device)
        tables = there[: len(rows) * width].view(len(rows), width)
        self._contexts.tables[: len(rows), :width].copy_(tables)

    def _plan(self, cut: HeadTiling) -> _Plan:
        """Created for the first layer of each kind, before anything is recorded."""
        key = (*cut.work, cut.heads, cut.head_dim)
        if key not in self._plans:
            spare = spare_splits(cut.blocks_per_split, self._processors)
            most = self._max_rows + spare
            room = padded_size(most, cut.heads)
            scratch = torch.zeros(room * (cut.head_dim + 2), device=self._device)
            self._plans[key] = _Plan(
                cut,
                spare,
                torch.zeros(3 * most, dtype=torch.int32, device=self._device),
                torch.zeros(2 * self._max_rows, dtype=torch.int32, device=self._device),
                split_scratch(scratch, room, cut.head_dim),
            )
            self._send(self._plans[key])
        return self._plans[key]

    def _send(self, plan: _Plan) -> None:
        """Sends the splits if they have changed. Padding rows have one split each, which does not
        affect the splits of other rows."""
        counts = np.ones(self._size, np.int64)
        counts[: len(self._lengths)] = count_splits(self._lengths, *plan.cut.work, self._processors)
        if np.array_equal(counts, plan.sent):
            return
        used, ranges = list_items(counts)
        items = np.zeros((self._size + plan.spare, 3), np.int32)
        items[: len(used)] = used
        sent_items, sent_ranges = send([items, ranges], self._device)
        plan.items[: items.size].copy_(sent_items[: items.size])
        plan.ranges[: ranges.size].copy_(sent_ranges[: ranges.size])
        plan.sent = counts
