"""Early stopping by Kendall's tau; keeps the best weights."""

from dataclasses import dataclass, field
from math import isnan, nan
from typing import Protocol

import torch
from torch import Tensor, nn

from lab.data.examples import ReportProgress


class Note(Protocol):
    """Prints a line."""

    def __call__(self, line: str, /) -> None: ...


@dataclass(frozen=True)
class TrainingReporter:
    """Callbacks for progress and log lines."""

    progress: ReportProgress
    note: Note


@dataclass(frozen=True)
class TrainingOptions:
    """How long to train.

    epochs: maximum, 0 for the default. patience: trials without improvement before stopping.
    layers: number of upper encoder layers to train, 0 for all.
    """

    epochs: int = 0
    patience: int = 3
    seed: int = 0
    layers: int = 0


@dataclass
class BestWeights:
    """Keeps the module's weights with the best tau."""

    module: nn.Module
    patience: int
    tau: float = nan
    _worse: int = 0  # trials since the best
    _kept: dict[str, Tensor] = field(default_factory=dict)

    @torch.no_grad()
    def offer(self, tau: float) -> bool:
        """Returns True when patience is exhausted. When tau is always NaN (lengths without an
        order), the last weights are kept and training continues."""
        if not (isnan(self.tau) or tau > self.tau):
            self._worse += 1
            return self._worse >= self.patience
        self.tau, self._worse = tau, 0
        self._kept = {key: value.clone() for key, value in self.module.state_dict().items()}
        return False

    def restore(self) -> None:
        """Restores the best weights; does nothing before the first trial."""
        if self._kept:
            self.module.load_state_dict(self._kept)
