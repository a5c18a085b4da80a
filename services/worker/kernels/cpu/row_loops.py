"""Norms, rotations and gates of a few rows, each one pass over them, compiled by Numba.

PyTorch computes each as up to seven calls on a CPU: of a small model, half a step went there.
"""

from typing import Any

import numpy as np
from numba import njit

from services.worker.kernels.cpu.loops import exponential

_ZERO, _ONE = np.float32(0.0), np.float32(1.0)


@njit(fastmath=True, nogil=True, cache=True)
def norm(x: Any, weight: Any, eps: Any, out: Any) -> None:
    """out = x / √(mean x² + eps) · weight; all [rows, numbers] but weight [numbers]."""
    numbers = x.shape[1]
    for row in range(x.shape[0]):
        total = _ZERO
        for i in range(numbers):
            total += x[row, i] * x[row, i]
        scale = _ONE / np.sqrt(total / np.float32(numbers) + eps)
        for i in range(numbers):
            out[row, i] = x[row, i] * scale * weight[i]


@njit(fastmath=True, nogil=True, cache=True)
def turn(x: Any, heads: int, weight: Any, eps: Any, cos: Any, sin: Any) -> None:
    """The first `heads` of x [rows, all heads, dim], in place: normed by weight [heads, dim] unless
    that is empty, then rotated by cos and sin [rows, turning]."""
    dim, half = x.shape[2], cos.shape[1] // 2
    for row in range(x.shape[0]):
        for head in range(heads):
            if weight.size:
                total = _ZERO
                for i in range(dim):
                    total += x[row, head, i] * x[row, head, i]
                scale = _ONE / np.sqrt(total / np.float32(dim) + eps)
                for i in range(dim):
                    x[row, head, i] *= scale * weight[head, i]
            for i in range(half):
                a, b = x[row, head, i], x[row, head, half + i]
                x[row, head, i] = a * cos[row, i] + b * sin[row, i]
                x[row, head, half + i] = b * cos[row, half + i] + a * sin[row, half + i]


@njit(fastmath=True, nogil=True, cache=True)
def gated(gate_up: Any, out: Any) -> None:
    """out [rows, width] = silu(gate) · up, of gate_up [rows, 2 · width]."""
    width = out.shape[1]
    for row in range(out.shape[0]):
        for i in range(width):
            gate = gate_up[row, i]
            e = exponential(-abs(gate))  # at most 1: no gate is too large
            share = _ONE / (_ONE + e)
            out[row, i] = gate * gate_up[row, width + i] * (share if gate >= _ZERO else e * share)
