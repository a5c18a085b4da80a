"""What a decoder layer does row by row, on a CPU in float32: row_loops.py for a step's rows."""

from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from services.worker.kernels.cpu import row_loops as loops

_NO_NORM = np.zeros((0, 0), np.float32)


class NumbaRowOps:
    """RowOps of the fused forward, for float32 on a CPU."""

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(x)
        loops.norm(x.numpy(), weight.numpy(), np.float32(eps), out.numpy())
        return out

    def turn(
        self, qkv: Tensor, heads: int, norm: Tensor | None, eps: float, cos: Tensor, sin: Tensor
    ) -> Tensor:
        weight = _NO_NORM if norm is None else norm.numpy()
        turns = cos[:, 0].numpy(), sin[:, 0].numpy()
        loops.turn(qkv.numpy(), heads, weight, np.float32(eps), *turns)
        return qkv[:, :heads]

    def gated(self, gate_up: Tensor) -> Tensor:
        out = torch.empty(len(gate_up), gate_up.shape[1] // 2)
        loops.gated(gate_up.numpy(), out.numpy())
        return out

    def warm(self) -> float:
        """Compile them, or load them from disk. Returns the seconds that took."""
        began = perf_counter()
        none, turns = torch.zeros(0, 2), torch.zeros(0, 1, 4).chunk(2, -1)
        self.norm(none, torch.zeros(2), 0.0)
        self.turn(torch.zeros(0, 1, 2), 1, None, 0.0, *turns)
        self.gated(none)
        return perf_counter() - began
