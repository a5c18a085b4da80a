"""Products of a step's rows with an INT8 matrix, by oneDNN.

Each row of the input is quantized as it comes, with its own scale, so that no calibration is needed
and a row does not depend on the others. Codes of the input are unsigned around 128, because the
processor's instructions (VNNI) multiply unsigned by signed bytes.
"""

import torch
from torch import Tensor

from services.worker.kernels.cpu import elementwise_loops as loops
from services.worker.kernels.cpu.number_formats import as_numpy
from services.worker.kernels.weights import Int8Weight, int8_codes

_NO_OFFSET = torch.zeros(1, dtype=torch.int64)  # codes of weights are symmetric


def missing() -> str:
    """What this machine lacks for INT8 products; empty if nothing is missing."""
    if "onednn" not in torch.backends.quantized.supported_engines:
        return "a PyTorch with oneDNN"
    # Without it, sums of two products in 16 bits saturate.
    return "" if torch.cpu._is_vnni_supported() else "a processor with VNNI instructions"


def pack(weight: Tensor) -> Int8Weight:
    """Quantizes `weight` [in, out] for `multiply`."""
    codes, scales = int8_codes(weight)
    return Int8Weight(torch.ops.onednn.qlinear_prepack(codes, None), scales)


def multiply(x: Tensor, weight: Int8Weight) -> Tensor:
    """x · weight in float32, with x [rows, in] quantized by row."""
    codes = torch.empty(x.shape, dtype=torch.uint8)
    scales = torch.empty(len(x), 1)
    loops.quantize_rows(as_numpy(x), codes.numpy(), scales.numpy())
    out: Tensor = torch.ops.onednn.qlinear_pointwise(
        codes, 1.0, loops.CODE_OF_ZERO, weight.codes, weight.scales, _NO_OFFSET,
        None, 1.0, 0, torch.float32, "none", [], "",
    )  # fmt: skip
    return out.mul_(scales)
