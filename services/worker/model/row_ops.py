"""What a decoder layer does row by row between its GEMMs, in plain PyTorch."""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import silu


class RowOps(Protocol):
    """Norms, rotations and activations of the fused forward: one call each, on any device."""

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMSNorm over the last dimension: x / √(mean x² + eps) · weight. x [rows, numbers]."""

    def turn(
        self, qkv: Tensor, heads: int, norm: Tensor | None, eps: float, cos: Tensor, sin: Tensor
    ) -> Tensor:
        """The first `heads` of qkv [rows, all heads, head_dim] (queries, then keys), each head
        normed by norm [heads, head_dim] where there is one, and rotated: the dimensions of
        cos and sin [rows, 1, turning], the first half of each sin negative. May be done in place.
        """

    def gated(self, gate_up: Tensor) -> Tensor:
        """silu(gate) · up of gate_up [rows, 2 · width]. May be done in place."""


class TorchRowOps:
    """RowOps anywhere and in any dtype."""

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return torch.rms_norm(x, weight.shape, weight, eps)

    def turn(
        self, qkv: Tensor, heads: int, norm: Tensor | None, eps: float, cos: Tensor, sin: Tensor
    ) -> Tensor:
        x = qkv[:, :heads]
        if norm is not None:
            x = torch.rms_norm(x, norm.shape[1:], None, eps).mul_(norm)
        turning = x[..., : cos.shape[-1]]
        swapped = turning.roll(cos.shape[-1] // 2, -1)
        turning.mul_(cos).addcmul_(swapped, sin)
        return x

    def gated(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return silu(gate, inplace=True).mul_(up)


def row_ops_for(device: torch.device, dtype: torch.dtype) -> RowOps:
    """Numba's on a CPU in float32 and bfloat16, compiled or loaded now; PyTorch's anywhere else."""
    if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16):
        return TorchRowOps()
    from services.worker.kernels.cpu.row_ops import NumbaRowOps  # a GPU's worker needs no Numba

    ops = NumbaRowOps(dtype)
    ops.warm()
    return ops
