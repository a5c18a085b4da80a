"""Decoder layer operations besides attention, in plain PyTorch."""

import torch
from torch import Tensor
from torch.nn.functional import pad, silu

from services.worker.kernels.weights import INT8_MAX, TINY, Int8Weight, Weight, int8_codes

# torch._int_mm on a GPU takes more than 16 rows, and sizes that are multiples of 8.
INT8_ROWS, INT8_MULTIPLE = 32, 8


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

    def lacks_for_int8(self, device: torch.device) -> str:
        """What `quantize` needs and does not have; empty if nothing is missing."""
        return "" if device.type == "cuda" else "float32 or bfloat16 on a CPU"

    def quantize(self, weight: Tensor) -> Int8Weight:
        """`weight` [in, out] in INT8, with one scale per output. Its products quantize each row of
        x with its own scale. Raises ValueError for a size that they do not support."""
        if any(size % INT8_MULTIPLE for size in weight.shape):
            raise ValueError(
                f"INT8 products need sizes that are multiples of {INT8_MULTIPLE}, not "
                f"{weight.shape[0]} × {weight.shape[1]}"
            )
        codes, scales = int8_codes(weight)
        return Int8Weight(codes.t(), scales)

    def product(self, x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
        """x · weight + bias; x [rows, in], weight [in, out]."""
        if isinstance(weight, Int8Weight):
            product = self.int8_product(x, weight)
            return (product if bias is None else product.add_(bias)).to(x.dtype)
        return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)

    def add_product(self, total: Tensor, x: Tensor, weight: Weight) -> None:
        """total += x · weight, in place; total [rows, out]."""
        if isinstance(weight, Int8Weight):
            total.add_(self.int8_product(x, weight))
        else:
            total.addmm_(x, weight)

    def int8_product(self, x: Tensor, weight: Int8Weight) -> Tensor:
        """x · weight in float32, with x [rows, in] quantized by row."""
        numbers = x.float()
        scales = (numbers.abs().amax(1, keepdim=True) / INT8_MAX).clamp_(min=TINY)
        codes = (numbers / scales).round_().to(torch.int8)
        codes = pad(codes, (0, 0, 0, max(0, INT8_ROWS - len(x))))
        sums = torch._int_mm(codes, weight.codes)[: len(x)]
        return sums.float().mul_(scales).mul_(weight.scales)

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
