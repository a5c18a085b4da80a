"""Interface of the kernels that copy between scattered KV blocks and a staging buffer."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from services.worker.kv.cache import KVLayer


@dataclass(frozen=True, slots=True)
class StagedLayer:
    """One layer of `n` blocks in transfer, as strided views of a staging buffer.

    `data` is [n, 2, kv_heads, block_tokens, head_dim]. It is accompanied by
    nothing (the cache's native dtype, bit for bit); `scales` [n, 2, kv_heads, block_tokens]
    float32 (an INT8 cache's bytes and scales, bit for bit); or `ranges`
    [n, 2, kv_heads, 2, head_dim] of the native dtype (data is int8, quantized at rest: λ, then
    the minimum, per block, head and channel).
    """

    data: Tensor
    scales: Tensor | None = None
    ranges: Tensor | None = None


class BlockCopies(Protocol):
    """Copies between scattered blocks of a layer and a contiguous staging buffer on one device.

    INT8 in host memory is asymmetric per (block, head, channel) over the block's filled tokens:
    x = λ·(x_q + 128) + min, λ = (max − min)/255 rounded up to the native dtype. This is
    ALISE's formula (Zhao et al., 2024, Eq. 8) with z = −128 − min/λ left unrounded, so
    that min comes back exactly and λ = 0 (a constant channel) needs no special case.
    Computed in float32; finite input never gives inf or NaN.
    """

    def gather(self, layer: KVLayer, blocks: Tensor, filled: Tensor, out: StagedLayer) -> None:
        """Copies `blocks` [n] to `out`. `filled` [n] is the number of valid tokens of each block
        (1 … block_tokens); positions after them must not affect a quantization range."""

    def scatter(self, layer: KVLayer, blocks: Tensor, staged: StagedLayer) -> None:
        """Copies `staged` into `blocks` [n], dequantizing it if it is quantized."""
