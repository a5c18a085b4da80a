"""Interfaces for a model that is sharded over several ranks."""

from typing import Protocol

from torch import Tensor
from transformers import PreTrainedModel


class Collectives(Protocol):
    """Collective operations. All ranks call them in the same order."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def sum(self, x: Tensor) -> Tensor:
        """Sums x over all ranks in place; x is contiguous. Bit-identical on all ranks."""

    def all_gather(self, x: Tensor) -> Tensor:
        """Concatenates x […, n] of all ranks in rank order: […, size · n]."""


class ModelSharder(Protocol):
    """Keeps this rank's shard of a model."""

    @property
    def ranks(self) -> Collectives: ...

    def cut(self, module: PreTrainedModel) -> None:
        """Shards a fully loaded model in place; its forward still returns the results of the whole
        model. Raises ValueError, one sentence, if it cannot be split."""
