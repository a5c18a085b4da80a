"""Norms, rotations, gates and INT8 codes of a few rows, compiled by Numba.

PyTorch needs up to seven calls for each on a CPU, which take half a step of a small model. Inputs
are float32, or the bits of bfloat16 (number_formats.py), which are computed in float32 and rounded
once.

Loops index slices from 0, and divisors are not checked: otherwise LLVM cannot vectorise the loops.
"""

from functools import cache
from typing import Any

import numpy as np
from numba import njit

from services.worker.kernels.cpu.codegen.rotary_ops import rotate_head
from services.worker.kernels.cpu.exponential import exponential
from services.worker.kernels.cpu.kernel_cache import cached
from services.worker.kernels.cpu.number_formats import real, stored

CODE_OF_ZERO = 128
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
_LARGEST, _ROUNDED_ZERO = np.float32(127.0), np.float32(CODE_OF_ZERO + 0.5)


@cached
@njit(fastmath=True, nogil=True, cache=True, error_model="numpy")
def norm(x: Any, weight: Any, eps: Any, out: Any) -> None:
    """out = x / √(mean x² + eps) · weight; all [rows, numbers] but weight [numbers]."""
    for row in range(x.shape[0]):
        numbers, into = x[row], out[row]
        total = _ZERO
        for i in range(len(numbers)):
            number = real(numbers[i])
            total += number * number
        scale = _ONE / np.sqrt(total / np.float32(len(numbers)) + eps)
        for i in range(len(numbers)):
            into[i] = stored(real(numbers[i]) * scale * real(weight[i]), into[i])


@cache
def rotation(dim: int, half: int, normed: bool) -> Any:
    """The rotation of heads of `dim` numbers, 2 · `half` of which are rotated, after a norm if
    `normed`. These are compile-time constants, because a head is too short for a loop with unknown
    bounds."""
    norms = int(normed)  # intrinsics take integer constants

    def rotate(x: Any, heads: int, weight: Any, eps: Any, cos: Any, sin: Any) -> None:
        """Rotates the first `heads` of x [rows, all heads, dim] in place: normalised by weight
        [heads, dim], then rotated by cos and sin [rows, 2 · half]."""
        for row in range(x.shape[0]):
            for head in range(heads):
                rotate_head(dim, half, norms, x, row, head, weight, eps, cos, sin)

    return cached(njit(rotate, fastmath=True, nogil=True, cache=True))


@cached
@njit(fastmath=True, nogil=True, cache=True, error_model="numpy")
def silu_and_mul(gate_up: Any, out: Any) -> None:
    """out [rows, width] = silu(gate) · up, for gate_up [rows, 2 · width]."""
    width = out.shape[1]
    for row in range(out.shape[0]):
        gates, ups, into = gate_up[row, :width], gate_up[row, width:], out[row]
        for i in range(width):
            gate = real(gates[i])
            e = exponential(-abs(gate))  # at most 1, so that no gate overflows
            share = _ONE / (_ONE + e)
            weighed = gate * (share if gate >= _ZERO else e * share)
            into[i] = stored(weighed * real(ups[i]), into[i])


@cached
@njit(fastmath=True, nogil=True, cache=True, error_model="numpy")
def quantize_rows(x: Any, codes: Any, scales: Any) -> None:
    """Unsigned codes [rows, numbers] of x, and scales [rows, 1], largest |x| / 127 of each row:
    x ≈ (code − 128) · scale."""
    for row in range(x.shape[0]):
        numbers, into = x[row], codes[row]
        largest = _ZERO
        for i in range(len(numbers)):
            largest = max(largest, abs(real(numbers[i])))
        scales[row, 0] = largest / _LARGEST
        factor = _LARGEST / largest if largest > _ZERO else _ZERO
        for i in range(len(numbers)):
            # The sum is positive, so that truncation rounds it.
            into[i] = np.uint8(np.int32(real(numbers[i]) * factor + _ROUNDED_ZERO))
