"""Interfaces of attention and sampling kernels. The PyTorch reference runs on any device."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from services.worker.kv.cache import KVLayer
from services.worker.requests.batch import StepBatch


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """How a layer attends. `window` counts the query's own position; None sees everything."""

    scale: float
    window: int | None = None
    softcap: float | None = None


@dataclass(frozen=True, slots=True)
class Filters:
    """What may be drawn, by row [rows]: of the `top_k` likeliest, those before whom less than
    `top_p` of their sum lies, and which have at least `min_p` of the likeliest's share.

    Off is a top_k (int64) of the vocabulary or more, a top_p (float64) of 2, a min_p (float32) of
    0. `widest` is the largest top_k, None where a row sets none: the host's own, as those are not.
    """

    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    widest: int | None


class SamplingKernels(Protocol):
    """Chooses one token per row."""

    def argmax(self, logits: Tensor) -> Tensor:
        """Index of each row's largest of logits [rows, vocabulary], the first of equals; a
        NaN is larger than all numbers. [rows], int64."""

    def sample_filtered(self, probs: Tensor, filters: Filters, uniform: Tensor) -> Tensor:
        """Drawn among those that filters leave of probs [rows, vocabulary], float32, whose rows sum
        to 1: in falling order, equals by index, the first token kept whose running sum passes
        uniform × the sum of those kept; [rows], int64. The likeliest always stays. uniform [rows],
        float64, in [0, 1)."""


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


class RecordableAttention(AttentionKernels, Protocol):
    """AttentionKernels of decodes alone whose launches can be recorded once and played again.

    `prepare` is the host's part of each step: it brings to the device what changed of a batch of
    rows, and is not recorded. `slots` may be longer than the batch: the rows behind it are padding
    at position 0, each attending to its own token alone. `begin`, `store` and `attend` are
    recorded: they read nothing but memory that stays where it is, `slots` too.
    """

    row_tokens: int  # the longest context of a row

    def begin(self, positions: Tensor) -> None:
        """Once a forward, first: where the rows are, padding too, by `positions` and the slots."""
