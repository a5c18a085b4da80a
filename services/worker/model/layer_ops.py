"""Decoder layer operations besides attention, in plain PyTorch."""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import silu


class LayerOps(Protocol):
    """Products, norms, rotations and activations of the fused forward: one call each, on any
    device."""

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x · weight + bias; x [rows, in], weight [in, out]."""

    def add_product(self, total: Tensor, x: Tensor, weight: Tensor) -> None:
        """total += x · weight, in place; total [rows, out]."""

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMSNorm over the last dimension: x / √(mean x² + eps) · weight. x [rows, numbers]."""

    def turn(
        self, qkv: Tensor, heads: int, norm: Tensor | None, eps: float, cos: Tensor, sin: Tensor
    ) -> Tensor:
        """Rotates the first `heads` of qkv [rows, all heads, head_dim] (queries, then keys), after
        each head's norm by norm [heads, head_dim] if given: the dimensions of cos and sin [rows, 1,
        rotated], with the first half of each sin negated. May work in place."""

    def gated(self, gate_up: Tensor) -> Tensor:
        """silu(gate) · up of gate_up [rows, 2 · width]. May work in place."""


class TorchLayerOps:
    """LayerOps for any device and dtype."""

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)

    def add_product(self, total: Tensor, x: Tensor, weight: Tensor) -> None:
        total.addmm_(x, weight)

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


def layer_ops_for(device: torch.device, dtype: torch.dtype) -> LayerOps:
    """Numba's on a CPU in float32 and bfloat16, compiled or loaded now; else PyTorch's."""
    if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16):
        return TorchLayerOps()
    # A GPU's worker needs no Numba.
    from services.worker.kernels.cpu.layer_ops import NumbaLayerOps
    from services.worker.kernels.cpu.threads import wide_vectors

    ops = NumbaLayerOps(dtype, wide_vectors())
    ops.warm()
    return ops
