"""KVCache: the memory behind the blocks, one tensor a layer, native or INT8."""

from dataclasses import dataclass

import torch
from torch import Tensor

SCALE_BYTES = torch.float32.itemsize


@dataclass(frozen=True)
class KVShape:
    """Keys and values of one token in one layer."""

    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class KVLayer:
    """One layer's blocks, keys then values.

    `data` is [2, blocks, kv_heads, block_tokens, head_dim], in the model's dtype or int8; with
    int8, `scales` [2, blocks, kv_heads, block_tokens] float32 times data is the value. Both are
    contiguous.
    """

    data: Tensor
    scales: Tensor | None = None


@dataclass(frozen=True)
class KVCache:
    """All layers' blocks.

    Zeroed once, because what a mask hides is still multiplied (by 0) and must be finite.
    """

    layers: list[KVLayer]
    block_tokens: int

    @classmethod
    def allocate(
        cls,
        shapes: list[KVShape],
        blocks: int,
        block_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        int8: bool = False,
    ) -> "KVCache":
        """`dtype` is the model's; with `int8`, blocks hold bytes and scales instead."""
        layers = []
        for shape in shapes:
            size = (2, blocks, shape.kv_heads, block_tokens)
            data = torch.zeros(
                *size, shape.head_dim, dtype=torch.int8 if int8 else dtype, device=device
            )
            scales = torch.zeros(size, dtype=torch.float32, device=device) if int8 else None
            layers.append(KVLayer(data, scales))
        return cls(layers, block_tokens)


def bytes_per_token(shapes: list[KVShape], dtype: torch.dtype, int8: bool = False) -> int:
    """Device bytes of one token's keys and values in all layers, scales included."""
    return sum(2 * s.kv_heads * _head_bytes(s.head_dim, dtype, int8) for s in shapes)


def _head_bytes(head_dim: int, dtype: torch.dtype, int8: bool) -> int:
    return head_dim + SCALE_BYTES if int8 else head_dim * dtype.itemsize
