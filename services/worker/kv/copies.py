"""Between scattered blocks and a contiguous staging buffer: what kernels offer the swapper."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from services.worker.kv.cache import KVLayer


@dataclass(frozen=True, slots=True)
class StagedLayer:
    """One layer of `n` blocks on their way, as strided views of a staging buffer.

    `data` is [n, 2, kv_heads, block_tokens, head_dim]. Beside it, one of three:
    neither (the cache's native dtype, bit for bit); `scales` [n, 2, kv_heads, block_tokens]
    float32 (an INT8 cache's bytes and scales, bit for bit); or `ranges`
    [n, 2, kv_heads, 2, head_dim] of the native dtype (data is int8, quantized at rest: λ, then
    the minimum, per block, head and channel).
    """

    data: Tensor
    scales: Tensor | None = None
    ranges: Tensor | None = None


class BlockCopies(Protocol):
    """Between scattered blocks of a layer and a contiguous staging buffer on the same device.

    At rest INT8 is asymmetric per (block, head, channel) over the block's filled tokens:
    x = λ·(x_q + 128) + min, λ = (max − min)/255 rounded up to the native dtype. This is
    ALISE's formula (papers/001, Eq. 8; ALGORITHMS 2) with z = −128 − min/λ left unrounded, so
    that min comes back exactly and λ = 0 (a constant channel) needs no case of its own.
    Computed in float32; finite input never gives inf or NaN.
    """

    def gather(self, layer: KVLayer, blocks: Tensor, filled: Tensor, out: StagedLayer) -> None:
        """Copy `blocks` [n] out; `filled` [n] tokens of each count (1 … block_tokens), whatever
        lies behind them must not widen a range."""

    def scatter(self, layer: KVLayer, blocks: Tensor, staged: StagedLayer) -> None:
        """Copy them back into `blocks` [n], dequantized if they were quantized at rest."""
