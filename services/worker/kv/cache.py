"""KVCache: the memory of the KV blocks, one tensor per layer, in the native dtype or INT8."""

import mmap
from contextlib import suppress
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

SCALE_BYTES = torch.float32.itemsize
HUGE_PAGE_BYTES = 2 * 2**20


@dataclass(frozen=True)
class KVShape:
    """Shape of the keys, and of the values, of one token in one layer."""

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
    """The blocks of all layers.

    Zeroed once: masked positions are still multiplied (by 0), so their values must be finite.
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
        """Allocates zeroed blocks in `dtype`, or in int8 with float32 scales if `int8`."""
        layers = []
        for shape in shapes:
            size = (2, blocks, shape.kv_heads, block_tokens)
            data = _zeros((*size, shape.head_dim), torch.int8 if int8 else dtype, device)
            scales = _zeros(size, torch.float32, device) if int8 else None
            layers.append(KVLayer(data, scales))
        return cls(layers, block_tokens)


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns zeros, on a CPU in huge pages where the system has them.

    Blocks are scattered: with small pages, page-table walks took a quarter of attention's time."""
    count = prod(size) * dtype.itemsize
    if device.type != "cpu" or count < HUGE_PAGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(size, dtype=dtype, device=device)
    memory = mmap.mmap(-1, count)  # zeroed; physical pages are allocated on first write
    with suppress(OSError):  # kernels without huge pages use small ones
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(size)


def bytes_per_token(shapes: list[KVShape], dtype: torch.dtype, int8: bool = False) -> int:
    """Returns the device bytes of one token's keys and values in all layers, including scales."""
    number_bytes, scale_bytes = (1, SCALE_BYTES) if int8 else (dtype.itemsize, 0)
    return sum(2 * s.kv_heads * (s.head_dim * number_bytes + scale_bytes) for s in shapes)
