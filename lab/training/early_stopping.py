"""Early stopping on Kendall's tau, with the weights that had the best."""

from dataclasses import dataclass, field
from math import isnan, nan
from typing import Protocol

import torch
from torch import Tensor, nn

from lab.data.examples import Tell


class Note(Protocol):
    """Told a sentence that is worth keeping."""

    def __call__(self, line: str, /) -> None: ...


@dataclass(frozen=True)
class Report:
    """Who is told how the work goes on."""

    tell: Tell
    note: Note


@dataclass(frozen=True)
class Course:
    """How long to train: at most `epochs` (0: as many as usual), and `patience` trials without a
    better tau. `layers`: how many upper ones of an encoder learn, 0 for all."""

    epochs: int = 0
    patience: int = 3
    seed: int = 0
    layers: int = 0


@dataclass
class BestWeights:
    """Keeps the weights a module had when it did best; `tau` is what it did then."""

    module: nn.Module
    patience: int
    tau: float = nan
    _worse: int = 0  # trials since the best
    _kept: dict[str, Tensor] = field(default_factory=dict)

    @torch.no_grad()
    def offer(self, tau: float) -> bool:
        """True when patience is at an end. Where lengths have no order, and tau is always NaN,
        the last weights are kept and nothing ends."""
        if not (isnan(self.tau) or tau > self.tau):
            self._worse += 1
            return self._worse >= self.patience
        self.tau, self._worse = tau, 0
        self._kept = {key: value.clone() for key, value in self.module.state_dict().items()}
        return False

    def restore(self) -> None:
        """Puts the best weights back; leaves a module alone that was never tried."""
        if self._kept:
            self.module.load_state_dict(self._kept)
