"""Interfaces of the attention and sampling kernels. The PyTorch reference runs on any device."""

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
    """Sampling filters by row [rows]. A row keeps, among its `top_k` most likely tokens, those
    with predecessors that sum to less than `top_p` of these tokens' sum, and with a probability of
    at least `min_p` of the most likely token's.

    These values turn a filter off: a top_k (int64) not below the vocabulary size, a top_p (float64)
    of 2, a min_p (float32) of 0. `widest` is the largest top_k, known to the host; None if no row
    sets one.
    """

    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    widest: int | None


class SamplingKernels(Protocol):
    """Chooses one token per row."""

    def argmax(self, logits: Tensor) -> Tensor:
        """The index of the largest logit of each row of [rows, vocabulary], the first of equal
        ones; NaN is the largest. [rows], int64."""

    def sample_filtered(self, probs: Tensor, filters: Filters, uniform: Tensor) -> Tensor:
        """Draws a token of each row among those that the filters keep: in falling order, equal ones
        by index, the first kept token with a running sum above uniform × the sum of the kept ones.
        The most likely token is always kept.

        probs [rows, vocabulary], float32, rows sum to 1; uniform [rows], float64, in [0, 1).
        Returns [rows], int64.
        """

    def mask_tokens(self, logits: Tensor, rows: Tensor, bits: Tensor) -> None:
        """Sets the logits of tokens without a bit to −inf, in place. Bit i of word w belongs to
        token 32·w + i; words beyond the vocabulary are ignored.

        logits [batch, vocabulary], float32; rows [masked], int64, of the batch, each once; bits
        [masked, words], int32, of at least the vocabulary.
        """


class AttentionStep(Protocol):
    """The attention of one forward, called once per layer."""

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions
    ) -> Tensor:
        """q, k, v [Σ tokens, heads, head_dim] → the shape of q. Heads may be strided slices of a
        wider row."""


class AttentionKernels(Protocol):
    """Stores and attends over one layer's blocks, native or INT8.

    `prepare` is called once per step; it may reuse its results while the batch is the same object.
    `store`, then `attend`, are called once per layer.
    """

    def prepare(self, batch: StepBatch, slots: Tensor) -> None:
        """Builds the indices that `attend` needs. `slots` [Σ tokens] are the places of the tokens:
        block · block_tokens + offset."""

    def store(self, layer: KVLayer, k: Tensor, v: Tensor) -> None:
        """Writes k and v [Σ tokens, kv_heads, head_dim] to the batch's slots.

        INT8 is symmetric per (token, head): scale = max|x| / 127, 0 for an all-zero row.
        """

    def attend(
        self, layer: KVLayer, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Causal attention of q [Σ tokens, heads, head_dim] over the stored context of each
        sequence. k and v are those of the step, already stored. Returns the shape of q."""


class RecordableAttention(AttentionKernels, Protocol):
    """AttentionKernels for decodes only. Launches can be recorded once and replayed.

    `prepare`, which is not recorded, copies the changes of a batch to the device. `slots` may be
    longer than the batch: the further rows are padding at position 0, each attending to its own
    token. `begin`, `store` and `attend` are recorded. They read only memory at fixed addresses,
    including `slots`.
    """

    row_tokens: int  # the longest context of a row

    def begin(self, positions: Tensor) -> None:
        """Called first in each forward: derives lengths and newest blocks of the rows, including
        padding, from `positions` and the slots."""
