"""Products with packed weights equal PyTorch's up to rounding, for any shapes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from services.worker.kernels.cpu.layer_ops import NumbaLayerOps
from services.worker.kernels.cpu.packed_products import can_pack, multiply, pack
from services.worker.kernels.reference.layer_ops import TorchLayerOps

SEEDS = st.integers(0, 2**31)
ROWS = st.one_of(st.integers(0, 9), st.sampled_from([31, 32, 33, 70]))  # packed for 32
NUMBERS = st.integers(1, 150)
OPS = NumbaLayerOps(torch.float32)


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def output_major(seed: int, inputs: int, outputs: int) -> Tensor:
    """A weight [in, out], as a view of a module's [out, in]."""
    return numbers(seed, outputs, inputs).t()


@settings(deadline=None)
@given(SEEDS, ROWS, NUMBERS, NUMBERS, st.booleans(), st.booleans())
def test_packed_product_of_any_shape(seed, rows, inputs, outputs, biased, strided):
    x = numbers(seed, rows, 2, inputs)[:, 1] if strided else numbers(seed, rows, inputs)
    weight = output_major(seed + 1, inputs, outputs)
    bias = numbers(seed + 2, outputs) if biased else None
    exact = x.double() @ weight.double() + (0 if bias is None else bias.double())
    ours = multiply(x, pack(weight), bias)
    torch.testing.assert_close(ours, exact.float(), rtol=3e-5, atol=3e-5)


@pytest.mark.skipif(not can_pack(torch.bfloat16), reason="oneDNN has no bfloat16 here")
@settings(deadline=None)
@given(SEEDS, ROWS, NUMBERS, NUMBERS)
def test_packed_bfloat16_product_sums_in_float32_and_rounds_once(seed, rows, inputs, outputs):
    x = numbers(seed, rows, inputs).bfloat16()
    weight = output_major(seed + 1, inputs, outputs).bfloat16()
    exact = x.double() @ weight.double()
    # Half of a bfloat16's last bit, and the difference of float32 sums at its boundary.
    ours = multiply(x, pack(weight), None).double()
    torch.testing.assert_close(ours, exact, rtol=2**-8, atol=1e-4)


@settings(deadline=None)
@given(SEEDS, ROWS, st.integers(2, 90), st.integers(2, 90))
def test_layer_operations_take_packed_weights(seed, rows, inputs, outputs):
    x, weight = numbers(seed, rows, inputs), output_major(seed + 1, inputs, outputs)
    total, bias = numbers(seed + 2, rows, outputs), numbers(seed + 3, outputs)
    packed, plain = OPS.pack(weight), TorchLayerOps()
    assert OPS.packs(weight) and packed.is_mkldnn and packed is not weight
    torch.testing.assert_close(
        OPS.product(x, packed, bias), plain.product(x, weight, bias), rtol=3e-5, atol=3e-5
    )
    ours = total.clone()
    OPS.add_product(ours, x, packed)
    plain.add_product(total, x, weight)
    torch.testing.assert_close(ours, total, rtol=3e-5, atol=3e-5)


def test_input_major_weights_are_not_packed():
    """They are small, and matmul.py multiplies them."""
    small = numbers(1, 5, 7)
    assert not OPS.packs(small) and OPS.pack(small) is small
    assert not TorchLayerOps().packs(output_major(1, 5, 7))
    assert not can_pack(torch.float16)
