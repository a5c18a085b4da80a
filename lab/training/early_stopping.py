"""Early stopping by Kendall's tau; keeps the best weights."""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import isnan, nan

import torch
from torch import Tensor, nn

from lab.data.examples import ReportProgress


@dataclass(frozen=True)
class TrainingReporter:
    """Callbacks of a training; `note` prints a line."""

    progress: ReportProgress
    note: Callable[[str], None]


@dataclass(frozen=True)
class TrainingOptions:
    """Settings of a training.

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
    _trials_since_best: int = 0
    _weights: dict[str, Tensor] = field(default_factory=dict)

    @torch.no_grad()
    def offer(self, tau: float) -> bool:
        """Returns True when patience is exhausted. If every tau is NaN (all lengths are equal), the
        last weights are kept and training continues."""
        if not (isnan(self.tau) or tau > self.tau):
            self._trials_since_best += 1
            return self._trials_since_best >= self.patience
        self.tau, self._trials_since_best = tau, 0
        self._weights = {key: value.clone() for key, value in self.module.state_dict().items()}
        return False

    def restore(self) -> None:
        """Restores the best weights; does nothing before the first trial."""
        if self._weights:
            self.module.load_state_dict(self._weights)
