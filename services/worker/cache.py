"""KVCache: the memory behind the blocks, one tensor a layer."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class KVShape:
    """Keys and values of one token in one layer."""

    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class KVLayer:
    """One layer's blocks, keys then values.

    `data` is [2, blocks, kv_heads, block_tokens, head_dim], in the model's dtype or int8; with
    int8, `scales` [2, blocks, kv_heads, block_tokens] float32 times data is the value.
    """

    data: Tensor
    scales: Tensor | None = None


@dataclass(frozen=True)
class KVCache:
    """`layers[i]` is [2, blocks, block_tokens, kv_heads, head_dim]: keys, then values.

    Zeroed once, because what a mask hides is still multiplied (by 0) and must be finite.
    """

    layers: list[Tensor]
    block_tokens: int

    @classmethod
    def allocate(
        cls,
        shapes: list[KVShape],
        blocks: int,
        block_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> "KVCache":
        return cls(
            [
                torch.zeros(
                    2, blocks, block_tokens, s.kv_heads, s.head_dim, dtype=dtype, device=device
                )
                for s in shapes
            ],
            block_tokens,
        )


def bytes_per_token(shapes: list[KVShape], dtype: torch.dtype) -> int:
    return sum(2 * s.kv_heads * s.head_dim * dtype.itemsize for s in shapes)
