"""What a decoder layer does row by row, on a CPU: row_loops.py for a step's rows."""

import numpy as np
import torch
from torch import Tensor

from services.worker.kernels.cpu import row_loops as loops
from services.worker.kernels.cpu.stored import numbers_of


class NumbaRowOps:
    """RowOps of the fused forward on a CPU, for float32 and bfloat16."""

    def __init__(self, dtype: torch.dtype):
        self._dtype = dtype
        self._no_norm = numbers_of(torch.zeros(0, 0, dtype=dtype))

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(x)
        loops.norm(numbers_of(x), numbers_of(weight), np.float32(eps), numbers_of(out))
        return out

    def turn(
        self, qkv: Tensor, heads: int, norm: Tensor | None, eps: float, cos: Tensor, sin: Tensor
    ) -> Tensor:
        weight = self._no_norm if norm is None else numbers_of(norm)
        turns = numbers_of(cos[:, 0]), numbers_of(sin[:, 0])
        turn = loops.turn(qkv.shape[-1], cos.shape[-1] // 2, norm is not None)
        turn(numbers_of(qkv), heads, weight, np.float32(eps), *turns)
        return qkv[:, :heads]

    def gated(self, gate_up: Tensor) -> Tensor:
        out = torch.empty(len(gate_up), gate_up.shape[1] // 2, dtype=self._dtype)
        loops.gated(numbers_of(gate_up), numbers_of(out))
        return out

    def warm(self) -> None:
        """Compile norms and gates, or load them from disk, so that no step waits for it. Rotations
        are compiled for a model's heads: by its first forward, which is the check at start."""
        none = torch.zeros(0, 2, dtype=self._dtype)
        self.norm(none, torch.zeros(2, dtype=self._dtype), 0.0)
        self.gated(none)
