"""Interfaces of attention and sampling kernels. The PyTorch reference runs on any device."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from services.worker.kv.cache import KVLayer
from services.worker.requests.types.batch import StepBatch


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """A layer's attention options. `window` includes the query's own position; None is
    unlimited."""

    scale: float
    window: int | None = None
    softcap: float | None = None


@dataclass(frozen=True, slots=True)
class Filters:
    """Sampling filters by row [rows]: among the `top_k` most likely tokens, those preceded by less
    than `top_p` of their sum, with at least `min_p` of the most likely token's probability.

    Off is a top_k (int64) of at least the vocabulary, a top_p (float64) of 2, a min_p (float32) of
    0. `widest` is the largest top_k, known to the host; None if no row sets one.
    """

    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    widest: int | None


class SamplingKernels(Protocol):
    """Chooses one token per row."""

    def argmax(self, logits: Tensor) -> Tensor:
        """Index of each row's largest of logits [rows, vocabulary], the first of equals; NaN counts
        as largest. [rows], int64."""

    def sample_filtered(self, probs: Tensor, filters: Filters, uniform: Tensor) -> Tensor:
        """A draw among the tokens that the filters leave of probs [rows, vocabulary], float32,
        whose rows sum to 1: in falling order, equals by index, the first kept token whose
        running sum exceeds uniform × the sum of the kept ones; [rows], int64. The most likely
        token is always kept. uniform [rows], float64, in [0, 1)."""


class AttentionStep(Protocol):
    """The attention of one forward, called once per layer."""

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions
    ) -> Tensor:
        """q, k, v [Σ tokens, heads, head_dim] → the shape of q. Heads may be strided slices of a
        wider row."""


class AttentionKernels(Protocol):
    """Stores and attends over one layer's blocks, native or INT8.

    `prepare` is called once per step and may reuse its results while the batch is the same object;
    `store` and `attend` are called once per layer, in this order.
    """

    def prepare(self, batch: StepBatch, slots: Tensor) -> None:
        """Builds the indices that `attend` needs; `slots` [Σ tokens] is where each token is stored:
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
    """AttentionKernels for decodes only, whose launches can be recorded once and replayed.

    `prepare` is the host's part of each step: it copies changes of the batch to the device and is
    not recorded. `slots` may be longer than the batch: the rows behind it are padding at position
    0, each attending to its own token. `begin`, `store` and `attend` are recorded: they read only
    memory at fixed addresses, including `slots`.
    """

    row_tokens: int  # the longest context of a row

    def begin(self, positions: Tensor) -> None:
        """Called first in each forward: locates the rows, including padding, by `positions` and the
        slots."""
