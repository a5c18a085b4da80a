"""Copies between scattered blocks and a contiguous staging buffer, in plain PyTorch."""

import torch
from torch import Tensor

from services.worker.kv.cache import KVLayer
from services.worker.kv.copies import StagedLayer

STEPS = 255  # between a channel's minimum and maximum, in one byte
OFFSET = 128  # from unsigned steps to int8

# A channel with a range that could overflow float32 is computed from halved numbers, which is
# exact for numbers of this size.
WIDE = 1e38

# Integer types of the bits. For a number ≥ 0, adding 1 to its bits gives the next larger number.
BITS = {
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
}


class TorchBlocks:
    """BlockCopies on any device. O(bytes copied); quantizing holds the blocks in float32."""

    def gather(self, layer: KVLayer, blocks: Tensor, filled: Tensor, out: StagedLayer) -> None:
        if out.ranges is not None:
            _quantize(layer.data[:, blocks].transpose(0, 1), filled, out.data, out.ranges)
            return
        _copy_out(layer.data, blocks, out.data)
        if layer.scales is not None and out.scales is not None:
            _copy_out(layer.scales, blocks, out.scales)

    def scatter(self, layer: KVLayer, blocks: Tensor, staged: StagedLayer) -> None:
        data = staged.data
        if staged.ranges is not None:
            data = dequantize(data, staged.ranges)
        layer.data.index_copy_(1, blocks, data.transpose(0, 1))
        if layer.scales is not None and staged.scales is not None:
            layer.scales.index_copy_(1, blocks, staged.scales.transpose(0, 1))


def _copy_out(source: Tensor, blocks: Tensor, out: Tensor) -> None:
    """source [2, blocks, …] → out [n, 2, …]."""
    for side in range(2):
        out[:, side].copy_(source[side].index_select(0, blocks))


def _quantize(x: Tensor, filled: Tensor, codes: Tensor, ranges: Tensor) -> None:
    """Quantizes x [n, 2, kv_heads, block_tokens, head_dim] to codes of the same shape, and ranges
    of λ and minimum.

    Tokens after `filled` count as the minimum: they do not widen the range, and stay finite.
    """
    partial = (filled < x.shape[3]).nonzero().view(-1)
    tokens = torch.arange(x.shape[3], device=x.device).view(-1, 1)
    real = tokens < filled[partial].view(-1, 1, 1, 1, 1)
    x[partial] = torch.where(real, x[partial], x[partial][..., :1, :])
    low, high = x.amin(3), x.amax(3)
    step = _step(low.float(), high.float(), x.dtype)
    ranges[:, :, :, 0], ranges[:, :, :, 1] = step, low
    codes.copy_(_codes(x, step.float().unsqueeze(3), low.float().unsqueeze(3)))
    codes[partial] = codes[partial].where(real, -OFFSET)


def _step(low: Tensor, high: Tensor, dtype: torch.dtype) -> Tensor:
    """λ = (high − low) / 255, rounded up in dtype; 0 only for a constant channel."""
    part = _part(high * 0.5 - low * 0.5, WIDE)
    exact = (high * part - low * part) / STEPS / part
    step = exact.to(dtype)
    short = step.float() < exact if dtype is not torch.float32 else exact * STEPS < high - low
    return (step.view(BITS[dtype]) + short).view(dtype)


def _codes(x: Tensor, step: Tensor, low: Tensor) -> Tensor:
    """Steps above the minimum, 0 … 255, minus 128; whole numbers in float32."""
    part = _part(step, WIDE / OFFSET)
    divisor = torch.where(step == 0, 1, step * part)
    codes = (x.float() * part).sub_(low * part).div_(divisor).round_()
    return codes.clamp_(0, STEPS).sub_(OFFSET)


def dequantize(codes: Tensor, ranges: Tensor) -> Tensor:
    """x = λ·(codes + 128) + minimum, in the dtype of `ranges`, limited to its finite range.

    codes [n, 2, kv_heads, block_tokens, head_dim], ranges [n, 2, kv_heads, 2, head_dim].
    """
    step, low = ranges.float().unsqueeze(4).unbind(3)
    part = _part(step, WIDE / OFFSET)
    most = torch.finfo(ranges.dtype).max
    x = torch.add(codes, float(OFFSET)).mul_(step * part).add_(low * part).div_(part)
    return x.clamp_(-most, most).to(ranges.dtype)


def _part(size: Tensor, largest: float) -> Tensor:
    return torch.where(size > largest, 0.5, 1.0)
