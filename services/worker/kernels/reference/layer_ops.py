"""Decoder layer operations besides attention, in plain PyTorch."""

import torch
from torch import Tensor
from torch.nn.functional import silu


class TorchLayerOps:
    """Products, norms, rotations and activations of the fused forward: one call each, on any device
    and dtype."""

    def packs(self, weight: Tensor) -> bool:
        """Whether `pack` changes this weight's layout."""
        return False

    def pack(self, weight: Tensor) -> Tensor:
        """`weight` [in, out] in the layout that products are fastest with. If `packs(weight)`, only
        the products of these operations read the result."""
        return weight

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x · weight + bias; x [rows, in], weight [in, out]."""
        return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)

    def add_product(self, total: Tensor, x: Tensor, weight: Tensor) -> None:
        """total += x · weight, in place; total [rows, out]."""
        total.addmm_(x, weight)

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMSNorm over the last dimension: x / √(mean x² + eps) · weight. x [rows, numbers]."""
        return torch.rms_norm(x, weight.shape, weight, eps)

    def rotate(
        self, qkv: Tensor, heads: int, norm: Tensor | None, eps: float, cos: Tensor, sin: Tensor
    ) -> Tensor:
        """Rotates the first `heads` of qkv [rows, all heads, head_dim] (queries, then keys), after
        each head's norm by norm [heads, head_dim] if given: the dimensions of cos and sin [rows, 1,
        rotated], with the first half of each sin negated. May work in place."""
        x = qkv[:, :heads]
        if norm is not None:
            x = torch.rms_norm(x, norm.shape[1:], None, eps).mul_(norm)
        rotated = x[..., : cos.shape[-1]]
        swapped = rotated.roll(cos.shape[-1] // 2, -1)
        rotated.mul_(cos).addcmul_(swapped, sin)
        return x

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) · up of gate_up [rows, 2 · width]. May work in place."""
        gate, up = gate_up.chunk(2, -1)
        return silu(gate, inplace=True).mul_(up)
