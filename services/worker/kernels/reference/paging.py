"""Stores tokens into scattered blocks and reads contexts from them, native or INT8, in plain
PyTorch.

A layer is read by its (block, head) rows, so that a context is contiguous [rows, kv_heads, tokens,
head_dim], the layout that PyTorch's fused attention reads fastest.
"""

from math import prod

import torch
from torch import Tensor

from services.worker.kv.cache import KVLayer

INT8_MAX = 127
TINY = torch.finfo(torch.float32).tiny  # a smaller scale would be denormal and lose precision
LARGEST_SCALE = 2.6793e36  # times 127 it is still finite, and close to the largest float32
GROWTH = 1.25  # factor for a buffer that is too small, because contexts grow block by block


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantizes finite x […, head_dim] to int8 of the same shape, and scales […] float32.

    Symmetric: scale = max|x| / 127, and 0 for an all-zero row; |x − scale·q| ≤ scale / 2.
    """
    values = x.float()
    largest = values.abs().amax(-1)
    scales = (largest / INT8_MAX).clamp_(TINY, LARGEST_SCALE)
    codes = (values / scales.unsqueeze(-1)).round_().clamp_(-INT8_MAX, INT8_MAX)
    return codes.to(torch.int8), scales.masked_fill_(largest == 0, 0)


class TokenIndex:
    """The places of a step's tokens in a layer viewed as rows of head_dim."""

    def __init__(self, block_tokens: int):
        self._block_tokens = block_tokens
        self._heads: dict[int, Tensor] = {}
        self._kept: dict[int, Tensor] = {}

    def set_slots(self, slots: Tensor) -> None:
        """Sets the `slots` [Σ tokens] of another step."""
        self._slots = slots
        self._kept.clear()

    def rows(self, kv_heads: int) -> Tensor:
        """The rows of the tokens [Σ tokens, kv_heads]."""
        if kv_heads not in self._kept:
            self._kept[kv_heads] = self._rows(kv_heads)
        return self._kept[kv_heads]

    def _rows(self, kv_heads: int) -> Tensor:
        if kv_heads not in self._heads:
            heads = torch.arange(kv_heads, device=self._slots.device)
            self._heads[kv_heads] = heads * self._block_tokens
        blocks = self._slots // self._block_tokens
        first = torch.add(self._slots, blocks, alpha=(kv_heads - 1) * self._block_tokens)
        return first.unsqueeze(-1) + self._heads[kv_heads]


def store(layer: KVLayer, index: TokenIndex, k: Tensor, v: Tensor) -> None:
    """Stores k and v [Σ tokens, kv_heads, head_dim]."""
    rows = (index.rows(k.shape[1]),)
    for side, x in enumerate((k, v)):
        data = layer.data[side].view(-1, x.shape[-1])
        if layer.scales is None:
            data.index_put_(rows, x)
        else:
            codes, scales = quantize(x)
            data.index_put_(rows, codes)
            layer.scales[side].view(-1).index_put_(rows, scales)


class Buffers:
    """Memory that all gathers reuse. An allocation per layer would cost more than the copy, and a
    small buffer stays in the CPU's caches until attention reads it. Each grows to the largest
    context of one layer that is read at once."""

    def __init__(self, device: torch.device, dtype: torch.dtype):
        self.values = Buffer(device, dtype)
        self.codes = Buffer(device, torch.int8)
        self.scales = Buffer(device, torch.float32)


class Buffer:
    def __init__(self, device: torch.device, dtype: torch.dtype):
        self._memory = torch.empty(0, device=device, dtype=dtype)

    def view(self, *shape: int) -> Tensor:
        size = prod(shape)
        if size > len(self._memory):
            self._memory = self._memory.new_empty(int(size * GROWTH))
        return self._memory[:size].view(shape)


class Context:
    """Reads the blocks of `tables` [rows, n] from layers with the shape of `layer`.

    `values` [2, rows, kv_heads, n · block_tokens, head_dim], in the model's dtype, are those of the
    layer read last. Another read into the same buffers overwrites them.
    """

    def __init__(self, buffers: Buffers, tables: Tensor, layer: KVLayer):
        _, blocks, kv_heads, block_tokens, dim = layer.data.shape
        heads = torch.arange(kv_heads, device=tables.device).unsqueeze(-1)
        keys = tables.unsqueeze(1) * kv_heads + heads
        self._index = torch.cat([keys.view(-1), keys.view(-1) + blocks * kv_heads])
        shape = (2, len(tables), kv_heads, tables.shape[1] * block_tokens)
        self.values = buffers.values.view(*shape, dim)
        self._codes = self._scales = None
        if layer.scales is not None:
            self._codes = buffers.codes.view(*shape, dim)
            self._scales = buffers.scales.view(*shape, 1)

    def read(self, layer: KVLayer) -> None:
        """Reads a layer. O(bytes): every (block, head) row is copied once."""
        if self._codes is None or self._scales is None or layer.scales is None:
            self._gather(layer.data, self.values)
            return
        self._gather(layer.data, self._codes)
        self._gather(layer.scales, self._scales)
        self.values.copy_(self._codes).mul_(self._scales)

    def _gather(self, blocks: Tensor, out: Tensor) -> None:
        rows = blocks.flatten(0, 2).flatten(1)
        torch.index_select(rows, 0, self._index, out=out.view(len(self._index), rows.shape[1]))
