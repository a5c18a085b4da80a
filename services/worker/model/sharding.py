"""A model of which this process has a part, as one of several ranks."""

from typing import Protocol

from torch import Tensor
from transformers import PreTrainedModel


class Collectives(Protocol):
    """Between ranks. All of them call, in the same order."""

    @property
    def size(self) -> int:
        """How many they are."""

    def sum(self, x: Tensor) -> Tensor:
        """Of all ranks' x, contiguous, in place; the same on each, bit for bit."""

    def all_gather(self, x: Tensor) -> Tensor:
        """All ranks' x […, n], in the order of ranks: […, size · n]."""


class ModelSharder(Protocol):
    """What of a model is this rank's."""

    @property
    def ranks(self) -> Collectives: ...

    def cut(self, module: PreTrainedModel) -> None:
        """Leaves this rank's part of a model that was loaded whole; its forward still gives what
        the whole gives. Raises ValueError, a sentence, where it can't be split."""
