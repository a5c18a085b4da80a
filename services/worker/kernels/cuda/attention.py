"""Paged attention in Triton."""

import torch
from torch import Tensor

from services.worker.kernels.cuda.device import (
    Paged,
    contiguous_rows,
    count_processors,
    products,
    require_runnable,
    send,
)
from services.worker.kernels.cuda.prefill import prefill
from services.worker.kernels.cuda.rows import RowsAttention
from services.worker.kernels.cuda.store import store
from services.worker.kernels.cuda.tile_sizes import Tiles, power_of_two, prefill_tiles
from services.worker.kernels.cuda.work_split import list_tiles
from services.worker.kernels.interface import AttentionOptions
from services.worker.kv.cache import KVLayer
from services.worker.requests.types.batch import PrefillChunk, StepBatch

STORE_NUMBERS = 4096  # numbers of keys, and of values, per thread block


def store_tokens(layer: KVLayer, k: Tensor, v: Tensor, slots: Tensor, block_tokens: int) -> None:
    """Stores k and v [Σ tokens, kv_heads, head_dim] into `slots` [Σ tokens]."""
    tokens, kv_heads, head_dim = k.shape
    k, v, paged = contiguous_rows(k), contiguous_rows(v), Paged.from_layer(layer)
    dim = power_of_two(head_dim)
    rows = max(STORE_NUMBERS // dim, 1)
    store[(-(-tokens * kv_heads // rows),)](
        k, v, slots, *paged.pointers, tokens * kv_heads,
        *k.stride()[:2], *v.stride()[:2], *paged.strides,
        KV_HEADS=kv_heads, INT8=paged.int8, BLOCK_TOKENS=block_tokens,
        ROWS=rows, HEAD_DIM=head_dim, DIM=dim, num_warps=4,
    )  # fmt: skip


class TritonAttention:
    """AttentionKernels on a CUDA device; on the CPU under TRITON_INTERPRET=1.

    No method waits for the device: launch parameters come from host arrays. `processors` is the
    number of multiprocessors to fill, by default all.
    """

    def __init__(
        self,
        block_tokens: int,
        device: torch.device,
        dtype: torch.dtype,
        processors: int | None = None,
    ):
        require_runnable(device)
        self._block_tokens = block_tokens
        self._device = device
        self._dtype = dtype
        self._rows = RowsAttention(block_tokens, device, processors or count_processors(device))
        self._chunks: list[PrefillChunk] = []
        self._first_row = 0
        self._tiles: dict[int, tuple[Tensor, Tensor, int]] = {}

    def prepare(self, batch: StepBatch, slots: Tensor) -> None:
        self._slots = slots
        self._rows.prepare(batch.decodes)
        self._chunks = batch.chunks
        self._first_row = len(batch.decodes)
        self._tiles = {}

    def store(self, layer: KVLayer, k: Tensor, v: Tensor) -> None:
        store_tokens(layer, k, v, self._slots, self._block_tokens)

    def attend(
        self, layer: KVLayer, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions
    ) -> Tensor:
        q, paged = contiguous_rows(q), Paged.from_layer(layer)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        kv_heads = layer.data.shape[2]
        if self._first_row:
            self._rows.attend(paged, kv_heads, q, out, options)
        if self._chunks:
            self._attend_chunks(paged, kv_heads, q, out, options)
        return out

    def _attend_chunks(
        self, paged: Paged, kv_heads: int, q: Tensor, out: Tensor, options: AttentionOptions
    ) -> None:
        heads, head_dim = q.shape[1:]
        group = heads // kv_heads
        sizes = prefill_tiles(head_dim, q.element_size())
        tile_heads = min(group, sizes.queries)
        head_tiles = -(-group // tile_heads)
        tiles, blocks, count = self._tiling(sizes, tile_heads)
        scores, outputs = products(q.dtype, paged.int8)
        prefill[(count, kv_heads * head_tiles)](
            q, out, tiles, blocks, *paged.pointers,
            *q.stride()[:2], *out.stride()[:2], *paged.strides, options.scale,
            GROUP=group, HEAD_TILES=head_tiles, TILE_HEADS=tile_heads,
            WINDOW=options.window or 0, SOFTCAP=options.softcap or 0.0, INT8=paged.int8,
            BLOCK_TOKENS=self._block_tokens, ROWS=sizes.queries, TILE=sizes.keys,
            HEAD_DIM=head_dim, DIM=power_of_two(head_dim), QK=scores, PV=outputs,
            num_warps=sizes.num_warps, num_stages=sizes.num_stages,
        )  # fmt: skip

    def _tiling(self, sizes: Tiles, tile_heads: int) -> tuple[Tensor, Tensor, int]:
        tokens = sizes.queries // tile_heads
        if tokens not in self._tiles:
            tiles, blocks = list_tiles(self._chunks, self._first_row, tokens)
            there = send([tiles, blocks], self._device)
            self._tiles[tokens] = (there[0], there[1], len(tiles))
        return self._tiles[tokens]
