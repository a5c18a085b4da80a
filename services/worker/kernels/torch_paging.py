"""Tokens into scattered blocks and contexts out of them, native or INT8, in plain PyTorch.

A heads-first layer is read through its (block, head) rows, so that a context comes out as
contiguous [rows, kv_heads, tokens, head_dim]: what PyTorch's fused attention reads fastest.
"""

import torch
from torch import Tensor

from services.worker.cache import KVLayer

INT8_MAX = 127
TINY = torch.finfo(torch.float32).tiny  # below it a scale would have lost precision itself
LARGEST_SCALE = 2.6793e36  # 127 of it are still finite, and reach the largest float32
GROWTH = 1.25  # of a buffer that became too small: contexts grow by a block at a time


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """x […, head_dim], finite → int8 of its shape, and scales […] float32.

    Symmetric: scale = max|x| / 127, and 0 for an all-zero row; |x − scale·q| ≤ scale / 2.
    """
    values = x.float()
    largest = values.abs().amax(-1)
    scales = (largest / INT8_MAX).clamp_(TINY, LARGEST_SCALE)
    codes = (values / scales.unsqueeze(-1)).round_().clamp_(-INT8_MAX, INT8_MAX)
    return codes.to(torch.int8), scales.masked_fill_(largest == 0, 0)


class TokenIndex:
    """Where tokens lie in a layer seen as rows of head_dim: [Σ tokens, kv_heads]."""

    def __init__(self, slots: Tensor, block_tokens: int):
        self._slots = slots
        self._block_tokens = block_tokens
        self._kept: dict[int, Tensor] = {}

    def rows(self, kv_heads: int) -> Tensor:
        if kv_heads not in self._kept:
            self._kept[kv_heads] = self._rows(kv_heads)
        return self._kept[kv_heads]

    def _rows(self, kv_heads: int) -> Tensor:
        blocks = self._slots // self._block_tokens
        first = self._slots + blocks * ((kv_heads - 1) * self._block_tokens)
        heads = torch.arange(kv_heads, device=first.device) * self._block_tokens
        return first.unsqueeze(-1) + heads


class BlockIndex:
    """Where the blocks of `tables` [rows, n] lie in a layer seen as (K or V, block, head) rows."""

    def __init__(self, tables: Tensor):
        self._tables = tables
        self._kept: dict[tuple[int, int], Tensor] = {}

    def rows(self, blocks: int, kv_heads: int) -> Tensor:
        """[2, rows, kv_heads, n] of a layer with that many blocks."""
        if (blocks, kv_heads) not in self._kept:
            self._kept[blocks, kv_heads] = self._rows(blocks, kv_heads)
        return self._kept[blocks, kv_heads]

    def _rows(self, blocks: int, kv_heads: int) -> Tensor:
        heads = torch.arange(kv_heads, device=self._tables.device).unsqueeze(-1)
        keys = self._tables.unsqueeze(1) * kv_heads + heads
        return torch.stack([keys, keys + blocks * kv_heads])


def store(layer: KVLayer, index: TokenIndex, k: Tensor, v: Tensor) -> None:
    """Write k and v [Σ tokens, kv_heads, head_dim] to their places."""
    rows = (index.rows(k.shape[1]),)
    for side, x in enumerate((k, v)):
        data = layer.data[side].view(-1, x.shape[-1])
        if layer.scales is None:
            data.index_put_(rows, x)
        else:
            codes, scales = quantize(x)
            data.index_put_(rows, codes)
            layer.scales[side].view(-1).index_put_(rows, scales)


class ContextReader:
    """Gathers contexts into buffers of its own; what one call gives, the next overwrites.

    The buffers grow to the largest context read at once (of one layer) and stay.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype):
        self._values = _Buffer(device, dtype)
        self._codes = _Buffer(device, torch.int8)
        self._scales = _Buffer(device, torch.float32)

    def read(self, layer: KVLayer, index: BlockIndex) -> Tensor:
        """[2, rows, kv_heads, n · block_tokens, head_dim] of the model's dtype."""
        if layer.scales is None:
            return _gather(layer.data, index, self._values)
        codes = _gather(layer.data, index, self._codes)
        scales = _gather(layer.scales.unsqueeze(-1), index, self._scales)
        return self._values.take(codes.shape).copy_(codes).mul_(scales)


def _gather(data: Tensor, index: BlockIndex, buffer: "_Buffer") -> Tensor:
    """data [2, blocks, kv_heads, block_tokens, dim] → [2, rows, kv_heads, n · block_tokens, dim].

    O(bytes read): every (block, head) row is copied once, whole.
    """
    _, blocks, kv_heads, _, dim = data.shape
    rows = index.rows(blocks, kv_heads)
    flat = data.view(2 * blocks * kv_heads, -1)
    out = buffer.take(torch.Size((rows.numel(), flat.shape[1])))
    torch.index_select(flat, 0, rows.view(-1), out=out)
    return out.view(*rows.shape[:3], -1, dim)


class _Buffer:
    """Memory that is used again; allocating it anew for every layer costs more than the copy."""

    def __init__(self, device: torch.device, dtype: torch.dtype):
        self._memory = torch.empty(0, device=device, dtype=dtype)

    def take(self, shape: torch.Size) -> Tensor:
        if shape.numel() > len(self._memory):
            self._memory = self._memory.new_empty(int(shape.numel() * GROWTH))
        return self._memory[: shape.numel()].view(shape)
