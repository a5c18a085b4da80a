"""Decoder layer operations besides attention on a CPU: small products by matmul.py, large ones by
packed_products.py, the rest by elementwise_loops.py."""

import numba
import numpy as np
import torch
from torch import Tensor

from services.worker.kernels.cpu import elementwise_loops as loops
from services.worker.kernels.cpu import int8_products as int8
from services.worker.kernels.cpu import packed_products as packed
from services.worker.kernels.cpu.matmul import product
from services.worker.kernels.cpu.number_formats import as_numpy
from services.worker.kernels.cpu.threads import numba_threads
from services.worker.kernels.reference.layer_ops import TorchLayerOps
from services.worker.kernels.weights import Int8Weight, Weight

MIN_ROWS = 2  # in float32; a library call is faster for one row
# Multiplications in bfloat16 above which a library is faster, because processors multiply pairs.
PAIRED_WORK = 1_300_000
THREAD_WORK = 500_000  # multiplications above which another thread saves time


class NumbaLayerOps(TorchLayerOps):
    """Layer operations on a CPU, for float32 and bfloat16."""

    def __init__(self, dtype: torch.dtype, multiplies: bool = True):
        """`multiplies`: whether matmul.py computes small products, which needs wide vectors."""
        self._dtype, self._multiplies = dtype, multiplies
        self._threads = numba_threads()
        self._no_norm = as_numpy(torch.zeros(0, 0, dtype=dtype))
        self._packs = packed.can_pack(dtype)

    def packs(self, weight: Tensor) -> bool:
        """Large matrices are packed. Small ones are in input-major layout, for matmul.py."""
        return self._packs and not weight.is_contiguous()

    def pack(self, weight: Tensor) -> Tensor:
        return packed.pack(weight) if self.packs(weight) else weight

    def lacks_for_int8(self, device: torch.device) -> str:
        return int8.missing()

    def quantize(self, weight: Tensor) -> Int8Weight:
        return int8.pack(weight)

    def int8_product(self, x: Tensor, weight: Int8Weight) -> Tensor:
        return int8.multiply(x, weight)

    def product(self, x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
        if isinstance(weight, Int8Weight):
            return super().product(x, weight, bias)
        if weight.is_mkldnn:
            return packed.multiply(x, weight, bias)
        if not self._is_small_product(x, weight):
            return super().product(x, weight, bias)
        out = torch.empty(len(x), weight.shape[1], dtype=self._dtype)
        if bias is not None:
            out.copy_(bias)
        self._multiply(x, weight, out, added=bias is not None)
        return out

    def add_product(self, total: Tensor, x: Tensor, weight: Weight) -> None:
        if isinstance(weight, Int8Weight):
            super().add_product(total, x, weight)
        elif weight.is_mkldnn:
            total.add_(packed.multiply(x, weight, None))
        elif self._is_small_product(x, weight):
            self._multiply(x, weight, total, added=True)
        else:
            super().add_product(total, x, weight)

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(x)
        loops.norm(as_numpy(x), as_numpy(weight), np.float32(eps), as_numpy(out))
        return out

    def rotate(
        self, qkv: Tensor, heads: int, norm: Tensor | None, eps: float, cos: Tensor, sin: Tensor
    ) -> Tensor:
        weight = self._no_norm if norm is None else as_numpy(norm)
        cos_sin = as_numpy(cos[:, 0]), as_numpy(sin[:, 0])
        rotate = loops.rotation(qkv.shape[-1], cos.shape[-1] // 2, norm is not None)
        rotate(as_numpy(qkv), heads, weight, np.float32(eps), *cos_sin)
        return qkv[:, :heads]

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        out = torch.empty(len(gate_up), gate_up.shape[1] // 2, dtype=self._dtype)
        loops.silu_and_mul(as_numpy(gate_up), as_numpy(out))
        return out

    def warm(self) -> None:
        """Compiles products, norms and gates, or loads them from disk, so that no step waits for
        it. The check of the forward at start compiles the rotations for the model's head size."""
        none, weight = torch.zeros(0, 2, dtype=self._dtype), torch.zeros(2, 2, dtype=self._dtype)
        for many in (False, True) if self._multiplies else ():
            multiply(none, weight, none.clone(), False, many)
        self.norm(none, weight[0], 0.0)
        loops.quantize_rows(
            as_numpy(none), np.zeros((0, 2), np.uint8), np.zeros((0, 1), np.float32)
        )
        self.silu_and_mul(none)

    def _is_small_product(self, x: Tensor, weight: Tensor) -> bool:
        """Whether matmul.py is faster. It needs a matrix in input-major layout, as small ones
        have."""
        if not self._multiplies or not weight.is_contiguous():
            return False
        if self._dtype is torch.bfloat16:
            return len(x) * weight.numel() <= PAIRED_WORK
        return len(x) >= MIN_ROWS

    def _multiply(self, x: Tensor, weight: Tensor, out: Tensor, added: bool) -> None:
        threads = 1
        if len(x) * weight.numel() > THREAD_WORK:
            threads = min(self._threads, torch.get_num_threads())
        if threads > 1:
            numba.set_num_threads(threads)  # a setting of the calling thread
        multiply(x.contiguous(), weight, out, added, threads > 1)


def multiply(x: Tensor, weight: Tensor, out: Tensor, added: bool, many: bool) -> None:
    """matmul.py's `product` on tensors."""
    product(many)(as_numpy(x), as_numpy(weight), added, as_numpy(out))
