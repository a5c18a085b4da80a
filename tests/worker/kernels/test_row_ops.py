"""Norms, rotations and gates by Numba: PyTorch's own, to the rounding, whatever the shapes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from services.worker.kernels.cpu.row_ops import NumbaRowOps
from services.worker.model.row_ops import TorchRowOps, row_ops_for

OURS, THEIRS = NumbaRowOps(), TorchRowOps()
SEEDS = st.integers(0, 2**31)


def numbers(seed: int, *shape: int, size: float = 1.0) -> Tensor:
    return size * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_near(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=3e-6, atol=3e-6)


@given(SEEDS, st.integers(0, 9), st.integers(1, 70), st.sampled_from([1e-20, 1.0, 1e4]))
def test_norm(seed, rows, width, size):
    x, weight = numbers(seed, rows, width, size=size), numbers(seed + 1, width)
    assert_near(OURS.norm(x, weight, 1e-6), THEIRS.norm(x, weight, 1e-6))


@settings(deadline=None)
@given(SEEDS, st.integers(1, 9), st.integers(1, 5), st.integers(1, 8), st.booleans(), st.data())
def test_turn_with_and_without_norms_and_with_dimensions_that_stay(
    seed, rows, heads, half, normed, data
):
    dim = 2 * half + data.draw(st.integers(0, 5))
    qkv = numbers(seed, rows, heads + 2, dim)
    weight = numbers(seed + 1, heads, dim) if normed else None
    angles = numbers(seed + 2, rows, 1, half, size=9.0)
    cos = torch.cat([angles.cos()] * 2, -1)
    sin = torch.cat([-angles.sin(), angles.sin()], -1)
    values = qkv[:, heads:].clone()
    expected = THEIRS.turn(qkv.clone(), heads, weight, 1e-6, cos, sin)
    assert_near(OURS.turn(qkv, heads, weight, 1e-6, cos, sin), expected)
    assert torch.equal(qkv[:, heads:], values), "values don't turn"


@given(SEEDS, st.integers(0, 9), st.integers(1, 70), st.sampled_from([1.0, 30.0, 1e4]))
def test_gated(seed, rows, width, size):
    """Far from 0 as well: silu(−1e4) is 0 and silu(1e4) is 1e4."""
    gate_up = numbers(seed, rows, 2 * width)
    gate_up[:, :width] *= size
    ours, theirs = OURS.gated(gate_up), THEIRS.gated(gate_up.clone())
    assert_near(ours / size, theirs / size)


@pytest.mark.parametrize(
    ("device", "dtype", "kind"),
    [("cpu", torch.float32, NumbaRowOps), ("cpu", torch.bfloat16, TorchRowOps),
     ("cuda", torch.float32, TorchRowOps)],
)  # fmt: skip
def test_which_serve(device, dtype, kind):
    assert type(row_ops_for(torch.device(device), dtype)) is kind
