"""Paged attention in plain PyTorch.

The context is gathered from its blocks, dequantized if they are INT8, and read by PyTorch's fused
attention. Decode rows are sorted by context length, and computed in groups of similar length,
padded to the longest of the group. Each prefill chunk is a separate group.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from services.worker.kernels.interface import AttentionOptions
from services.worker.kernels.reference.paging import Buffers, Context, TokenIndex, store
from services.worker.kv.cache import KVLayer
from services.worker.requests.types.batch import NO_INTS, DecodeRows, Ints, PrefillChunk, StepBatch

# Padding of a group above which another group is cheaper: a further gather and attention call cost
# as much as this many tokens of context (measured on a CPU, 2 KV heads of 32).
PADDING_TOKENS = 1024
# Context that a group gathers: more than a core's caches hold would be read from memory again
# (measured: up to 1.8 times as slow).
GROUP_BYTES = 2 * 2**20


class TorchAttention:
    """AttentionKernels on any device. `token_bytes` is the approximate size of a token's KV in one
    layer."""

    def __init__(
        self,
        block_tokens: int,
        device: torch.device,
        dtype: torch.dtype,
        token_bytes: int = 512,
    ):
        self._tokens = TokenIndex(block_tokens)
        self._device = device
        self._dtype = dtype
        self._group_tokens = GROUP_BYTES // token_bytes
        self.buffers = Buffers(device, dtype)
        self._arange = torch.arange(0, device=device)
        self._rows: DecodeRows | None = None
        self._decodes: list[_DecodeGroup] = []
        self._groups: list[_DecodeGroup | ChunkGroup] = []

    def prepare(self, batch: StepBatch, slots: Tensor) -> None:
        self._tokens.set_slots(slots)
        if batch.decodes is not self._rows or self._needs_more_room():
            self._rows = batch.decodes
            self._decodes = [
                _DecodeGroup(self, batch.decodes, first, last)
                for first, last in _similar(batch.decodes.positions, self._group_tokens)
            ]
        for group in self._decodes:
            group.refresh()
        self._groups = [*self._decodes, *self._chunk_groups(len(batch.decodes), batch.chunks)]

    def _needs_more_room(self) -> bool:
        """Whether grown rows make a group twice as large as it should be."""
        return any(
            group.rows > 1 and group.tokens > 2 * self._group_tokens for group in self._decodes
        )

    def _chunk_groups(self, row: int, chunks: list[PrefillChunk]) -> Iterator["ChunkGroup"]:
        for chunk in chunks:
            yield ChunkGroup(self, chunk, row)
            row += chunk.tokens

    def store(self, layer: KVLayer, k: Tensor, v: Tensor) -> None:
        store(layer, self._tokens, k, v)

    def attend(
        self, layer: KVLayer, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions
    ) -> Tensor:
        if len(self._groups) == 1:
            return self._groups[0].attend(layer, q, k, v, options)
        return torch.cat([group.attend(layer, q, k, v, options) for group in self._groups])

    def tensor(self, array: Ints) -> Tensor:
        return torch.from_numpy(array).to(self._device)

    def arange(self, length: int) -> Tensor:
        if length > len(self._arange):
            self._arange = torch.arange(2 * length, device=self._device)
        return self._arange[:length]

    def mask(self, positions: Tensor, length: int, window: int | None) -> Tensor:
        """[…, length]: 0 for keys that a query at `positions` […, 1] reads, −inf for others."""
        keys = self.arange(length)
        hidden = keys > positions
        if window is not None:
            hidden |= keys <= positions - window
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device)
        return mask.masked_fill_(hidden, -torch.inf)


def _similar(positions: Ints, group_tokens: int) -> Iterator[tuple[int, int]]:
    """Yields groups of rows, which have falling lengths. A group ends where its padding would cost
    more than another group, or where its context exceeds `group_tokens`."""
    first, padding = 0, 0
    lengths = positions.tolist()
    for row, length in enumerate(lengths):
        padding += lengths[first] - length
        tokens = (row + 1 - first) * lengths[first]
        if padding > PADDING_TOKENS or (tokens > group_tokens and row > first):
            yield first, row
            first, padding = row, 0
    if lengths:
        yield first, len(lengths)


class _DecodeGroup:
    """Decode rows [first, last), one query each. The query heads that share a KV head are computed
    as its queries."""

    def __init__(self, kernels: TorchAttention, rows: DecodeRows, first: int, last: int):
        self._kernels = kernels
        self._batch = rows
        self._span = slice(first, last)
        self.rows = last - first
        self._positions = rows.positions[first:last]
        self._tables = NO_INTS
        self._contexts: dict[torch.Size, Context] = {}

    @property
    def tokens(self) -> int:
        """Tokens of context, including padding."""
        return self.rows * (int(self._positions[0]) + 1)

    def refresh(self) -> None:
        """Updates the group to the present positions of its rows."""
        self._length = int(self._positions[0]) + 1
        blocks = -(-self._length // self._batch.block_tokens)
        tables = self._batch.tables[self._span, :blocks]
        if not np.array_equal(tables, self._tables):
            self._tables = tables.copy()
            self._contexts = {}
        self._seen: dict[torch.Size, tuple[Tensor, Tensor]] = {}
        self._masks: dict[int | None, Tensor | None] = {}

    def _read(self, layer: KVLayer) -> tuple[Tensor, Tensor]:
        """Keys and values [rows, kv_heads, length, head_dim]."""
        shape = layer.data.shape
        if shape not in self._contexts:
            tables = self._kernels.tensor(self._tables)
            self._contexts[shape] = Context(self._kernels.buffers, tables, layer)
        context = self._contexts[shape]
        context.read(layer)
        if shape not in self._seen:
            values = context.values[:, :, :, : self._length]
            self._seen[shape] = (values[0], values[1])
        return self._seen[shape]

    def _mask(self, window: int | None) -> Tensor | None:
        if window not in self._masks:
            self._masks[window] = self._make_mask(window)
        return self._masks[window]

    def _make_mask(self, window: int | None) -> Tensor | None:
        sees_all = window is None or window >= self._length
        if sees_all and int(self._positions[-1]) + 1 == self._length:
            return None  # the shortest is as long as the longest
        positions = self._kernels.tensor(self._positions).view(-1, 1, 1, 1)
        return self._kernels.mask(positions, self._length, window)

    def attend(
        self, layer: KVLayer, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions
    ) -> Tensor:
        heads, kv_heads, dim = q.shape[1], k.shape[1], q.shape[2]
        keys, values = self._read(layer)
        queries = q if self.rows == len(q) else q[self._span]
        queries = queries.reshape(self.rows, kv_heads, heads // kv_heads, dim)
        mask = self._mask(options.window)
        return attention(queries, keys, values, mask, options).reshape(self.rows, heads, dim)


class ChunkGroup:
    """One prefill chunk: its queries over the context before it and itself."""

    def __init__(self, kernels: TorchAttention, chunk: PrefillChunk, row: int):
        self._kernels = kernels
        self._chunk = chunk
        self._rows = slice(row, row + chunk.tokens)
        self._contexts: dict[torch.Size, Context] = {}
        self._masks: dict[int | None, Tensor] = {}

    def _context(self, layer: KVLayer, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [1, kv_heads, end, head_dim].

        From INT8 blocks even the tokens of this step are read, so that no result depends on how a
        prompt is divided into chunks.
        """
        if self._chunk.start or layer.scales is not None:
            context = self._context_of(layer)
            context.read(layer)
            keys, values = context.values[:, :, :, : self._chunk.end].unbind()
            return keys, values
        return k[self._rows].transpose(0, 1)[None], v[self._rows].transpose(0, 1)[None]

    def _context_of(self, layer: KVLayer) -> Context:
        shape = layer.data.shape
        if shape not in self._contexts:
            table = self._kernels.tensor(self._chunk.table)[None]
            self._contexts[shape] = Context(self._kernels.buffers, table, layer)
        return self._contexts[shape]

    def _mask(self, window: int | None) -> Tensor:
        if window not in self._masks:
            chunk = self._chunk
            positions = self._kernels.arange(chunk.end)[chunk.start :].view(-1, 1)
            self._masks[window] = self._kernels.mask(positions, chunk.end, window)
        return self._masks[window]

    def attend(
        self, layer: KVLayer, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions
    ) -> Tensor:
        keys, values = self._context(layer, k, v)
        group = q.shape[1] // k.shape[1]
        queries = q[self._rows].transpose(0, 1)[None]
        if group > 1 and options.softcap is not None:
            keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
        mask = self._mask(options.window)
        out = attention(queries, keys, values, mask, options, grouped=group > 1)
        return out[0].transpose(0, 1)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    options: AttentionOptions,
    grouped: bool = False,
) -> Tensor:
    """Softmax attention, q [n, heads, queries, dim] over k and v [n, kv_heads, keys, dim]."""
    if options.softcap is None:
        return scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=options.scale, enable_gqa=grouped
        )
    scores = q @ k.transpose(-1, -2) * options.scale
    scores = torch.tanh(scores / options.softcap) * options.softcap
    if mask is not None:
        scores = scores + mask
    return scores.float().softmax(-1).to(v.dtype) @ v
