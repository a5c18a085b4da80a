"""Products with a large matrix, by oneDNN: its weights are packed once for oneDNN's kernels.

A library that reads a plain matrix arranges its parts anew in each call. Measured with one thread,
matrices of 1,024 × 1,024 to 6,144 numbers and 2 to 256 rows: packed products take 0.4 to 0.8 of the
time of PyTorch's own in float32, and 0.4 to 0.9 in bfloat16. The operators are those that PyTorch's
compiler calls for frozen weights.
"""

import torch
from torch import Tensor

# Rows that the layout is chosen for: one chosen for a single row is slower for more, the others
# are equal for all numbers of rows.
ROWS = 32


def can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN is part of PyTorch and computes this dtype on this processor."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]  # not annotated
        return False
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype is torch.float32


def pack(weight: Tensor) -> Tensor:
    """A copy of `weight` [in, out] in a layout that only `multiply` reads."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.t().contiguous(), ROWS)
    return packed


def multiply(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """x · weight + bias; x [rows, in]."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return out
