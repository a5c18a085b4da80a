"""TimedAttention: attention as a phase of its own. Apart from the clock, which needs no PyTorch."""

from dataclasses import dataclass

from torch import Tensor

from services.worker.engine.phase_clock import EnginePhase, PhaseClock
from services.worker.kernels.interface import AttentionOptions, AttentionStep


@dataclass(frozen=True, slots=True)
class TimedAttention:
    """An AttentionStep with its time counted as ATTENTION instead of MODEL."""

    step: AttentionStep
    clock: PhaseClock

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions
    ) -> Tensor:
        self.clock.enter(EnginePhase.ATTENTION)
        attended = self.step.attend(layer, q, k, v, options)
        self.clock.enter(EnginePhase.MODEL)
        return attended
