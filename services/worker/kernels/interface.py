"""What a set of kernels offers: PyTorch's runs anywhere, Triton's takes the same calls on a GPU."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from services.worker.batch import StepBatch
from services.worker.cache import KVLayer


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """How a layer attends. `window` counts the query's own position; None sees everything."""

    scale: float
    window: int | None = None
    softcap: float | None = None


class AttentionStep(Protocol):
    """One forward's attention, called once a layer."""

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions
    ) -> Tensor:
        """q, k, v [Σ tokens, heads, head_dim] → the shape of q. Heads may be strided slices of a
        wider row."""


class AttentionKernels(Protocol):
    """Store and attend over one layer's blocks, native or INT8.

    `prepare` is called once a step and may keep what it builds while the batch is the same
    object; `store` and `attend` are called once a layer, in this order.
    """

    def prepare(self, batch: StepBatch, slots: Tensor) -> None:
        """Index whatever `attend` needs; `slots` [Σ tokens] is where each token is stored:
        block · block_tokens + offset."""

    def store(self, layer: KVLayer, k: Tensor, v: Tensor) -> None:
        """Write k and v [Σ tokens, kv_heads, head_dim] to the batch's slots.

        Into INT8: symmetric per (token, head), scale = max|x| / 127, 0 for an all-zero row.
        """

    def attend(
        self, layer: KVLayer, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions
    ) -> Tensor:
        """q [Σ tokens, heads, head_dim] over its own sequence's stored context, causally.

        k and v are the step's own, already stored. Returns the shape of q.
        """


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
