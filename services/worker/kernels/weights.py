"""Weights that the products of a device read: a matrix, or INT8 codes with scales."""

from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK_NUMBERS = 2**24  # of a weight that are quantized together, so that temporaries stay small
INT8_MAX = 127
TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """A matrix [in, out] as INT8 `codes`, in a layout of the device's operations, and `scales`
    [out] in float32: number = code · scale."""

    codes: Tensor
    scales: Tensor


Weight = Tensor | Int8Weight


def int8_codes(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [out, in] of a finite matrix [in, out], and the scales [out], largest number / 127 of
    each output: a number differs from code · scale by at most half a scale."""
    rows = weight.t()
    codes = torch.empty(rows.shape, dtype=torch.int8, device=weight.device)
    scales = torch.empty(len(rows), dtype=torch.float32, device=weight.device)
    size = max(1, CHUNK_NUMBERS // max(1, rows.shape[1]))
    for start in range(0, len(rows), size):
        part = slice(start, start + size)
        numbers = rows[part].float()
        scales[part] = (numbers.abs().amax(1) / INT8_MAX).clamp_(min=TINY)
        codes[part] = (numbers / scales[part, None]).round_().to(torch.int8)
    return codes, scales
