"""What a set of kernels offers: PyTorch's runs anywhere, Triton's takes the same calls on a GPU."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from services.worker.batch import StepBatch


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """How a layer attends. `window` counts the query's own position; None sees everything."""

    scale: float
    window: int | None = None
    softcap: float | None = None


class AttentionKernels(Protocol):
    """Store and attend over one layer's blocks [2, blocks, block_tokens, kv_heads, head_dim].

    `prepare` is called once a step and may keep what it builds while the batch is the same
    object; `store` and `attend` are called once a layer, in this order.
    """

    def prepare(self, batch: StepBatch, slots: Tensor) -> None:
        """Index whatever `attend` needs; `slots` [Σ tokens] is where each token is stored."""

    def store(self, layer: Tensor, k: Tensor, v: Tensor) -> None:
        """Write k and v [Σ tokens, kv_heads, head_dim] to the batch's slots."""

    def attend(
        self, layer: Tensor, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions
    ) -> Tensor:
        """q [Σ tokens, heads, head_dim] over its own sequence's stored context, causally.

        k and v are the step's own, already stored. Returns the shape of q.
        """
