"""Numba's norms, rotations and gates equal PyTorch's up to rounding, for any shapes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from services.worker.kernels.cpu.layer_ops import NumbaLayerOps
from services.worker.kernels.reference.layer_ops import TorchLayerOps
from services.worker.kernels.selection import layer_ops_for

OURS, THEIRS = NumbaLayerOps(torch.float32), TorchLayerOps()
HALVES = NumbaLayerOps(torch.bfloat16)
SEEDS = st.integers(0, 2**31)
# Numbers of a head, and half of the rotated ones: each pair is compiled.
HEADS = st.sampled_from([(8, 4), (37, 17), (40, 20)])


def numbers(seed: int, *shape: int, size: float = 1.0) -> Tensor:
    return size * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_near(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=3e-6, atol=3e-6)


@given(SEEDS, st.integers(0, 9), st.integers(1, 70), st.sampled_from([1e-20, 1.0, 1e4]))
def test_norm(seed, rows, width, size):
    x, weight = numbers(seed, rows, width, size=size), numbers(seed + 1, width)
    assert_near(OURS.norm(x, weight, 1e-6), THEIRS.norm(x, weight, 1e-6))


@settings(deadline=None)
@given(SEEDS, st.integers(1, 9), st.integers(1, 5), HEADS, st.booleans())
def test_rotation_with_and_without_norms_and_partial_dimensions(seed, rows, heads, shape, normed):
    dim, half = shape
    qkv = numbers(seed, rows, heads + 2, dim)
    weight = numbers(seed + 1, heads, dim) if normed else None
    angles = numbers(seed + 2, rows, 1, half, size=9.0)
    cos = torch.cat([angles.cos()] * 2, -1)
    sin = torch.cat([-angles.sin(), angles.sin()], -1)
    values = qkv[:, heads:].clone()
    expected = THEIRS.rotate(qkv.clone(), heads, weight, 1e-6, cos, sin)
    assert_near(OURS.rotate(qkv, heads, weight, 1e-6, cos, sin), expected)
    assert torch.equal(qkv[:, heads:], values), "values are not rotated"


@given(SEEDS, st.integers(0, 9), st.integers(1, 70), st.sampled_from([1.0, 30.0, 1e4]))
def test_gated_activation(seed, rows, width, size):
    """Also far from 0: silu(−1e4) is 0 and silu(1e4) is 1e4."""
    gate_up = numbers(seed, rows, 2 * width)
    gate_up[:, :width] *= size
    ours, theirs = OURS.silu_and_mul(gate_up), THEIRS.silu_and_mul(gate_up.clone())
    assert_near(ours / size, theirs / size)


@settings(deadline=None)
@given(SEEDS, st.integers(1, 5), st.integers(1, 40), HEADS)
def test_bfloat16_is_computed_in_float32_and_rounded_once(seed, rows, width, shape):
    dim, half = shape
    x, weight = numbers(seed, rows, 2 * width).bfloat16(), numbers(seed + 1, 2 * width).bfloat16()
    exact = OURS.norm(x.float(), weight.float(), 1e-6)
    assert_rounded(HALVES.norm(x, weight, 1e-6), exact)
    assert_rounded(HALVES.silu_and_mul(x), OURS.silu_and_mul(x.float()))
    qkv = numbers(seed + 2, rows, 3, dim).bfloat16()
    head_norm = numbers(seed + 3, 2, dim).bfloat16()
    cos, sin = numbers(seed + 4, rows, 1, 4 * half).bfloat16().chunk(2, -1)
    turned = OURS.rotate(qkv.float(), 2, head_norm.float(), 1e-6, cos.float(), sin.float())
    assert_rounded(HALVES.rotate(qkv, 2, head_norm, 1e-6, cos, sin), turned)


def test_nan_stays_nan_in_bfloat16():
    x = torch.tensor([[torch.nan, 1.0], [torch.inf, 1.0]], dtype=torch.bfloat16)
    x.view(torch.int16)[0, 0] = 0x7FFF  # a NaN that rounding up would change to −0
    ones = torch.ones(2, dtype=torch.bfloat16)
    assert HALVES.norm(x[:1], ones, 1e-6).isnan().all()
    turned = HALVES.rotate(x[:1].view(1, 1, 2), 1, None, 0.0, *torch.ones(2, 1, 1, 2).bfloat16())
    assert turned.isnan().all()
    assert HALVES.silu_and_mul(x[1:]).isinf().all()


def assert_rounded(ours: Tensor, exact: Tensor) -> None:
    """Equal to the nearest bfloat16, or to the one beside it if the rounding of float32 decides."""
    assert ours.dtype is torch.bfloat16
    torch.testing.assert_close(ours.float(), exact, rtol=2**-8 + 1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("device", "dtype", "kind"),
    [("cpu", torch.float32, NumbaLayerOps), ("cpu", torch.bfloat16, NumbaLayerOps),
     ("cpu", torch.float16, TorchLayerOps), ("cuda", torch.float32, TorchLayerOps)],
)  # fmt: skip
def test_layer_ops_selection(device, dtype, kind):
    assert type(layer_ops_for(torch.device(device), dtype)) is kind
