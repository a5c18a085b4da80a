"""INT8 products equal an exact oracle on the same codes, on the CPU's and on PyTorch's path."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from services.worker.kernels.cpu import int8_products
from services.worker.kernels.cpu.layer_ops import NumbaLayerOps
from services.worker.kernels.reference.layer_ops import TorchLayerOps
from services.worker.kernels.weights import int8_codes

OPS = NumbaLayerOps(torch.float32)
SEEDS = st.integers(0, 2**31)
needs_vnni = pytest.mark.skipif(bool(int8_products.missing()), reason="no INT8 instructions here")


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def exact(x: Tensor, weight: Tensor) -> np.ndarray:
    """The product of both matrices' codes in float64, by NumPy: x by row, weight by column."""
    rows, columns = x.double().numpy(), weight.double().numpy()
    row_scales = np.abs(rows).max(1, keepdims=True, initial=0) / 127
    column_scales = np.abs(columns).max(0, keepdims=True, initial=0) / 127
    codes = np.rint(np.divide(rows, row_scales, where=row_scales > 0, out=np.zeros_like(rows)))
    weight_codes = np.rint(
        np.divide(columns, column_scales, where=column_scales > 0, out=np.zeros_like(columns))
    )
    return np.asarray((codes @ weight_codes) * row_scales * column_scales)


def assert_equal_up_to_ties(ours: Tensor, x: Tensor, weight: Tensor) -> None:
    """A number halfway between two codes may take either: one step of its row's scale, times the
    largest weight, for a few numbers of a row."""
    step = x.double().abs().amax(1, keepdim=True) / 127 * weight.double().abs().amax()
    error = (ours.double() - torch.from_numpy(exact(x, weight))).abs()
    assert bool((error <= 2 * step + 1e-6).all())


@needs_vnni
@settings(deadline=None)
@given(SEEDS, st.integers(0, 40), st.integers(1, 90), st.integers(1, 90), st.booleans())
def test_cpu_product_of_any_shape(seed, rows, inputs, outputs, strided):
    x = numbers(seed, rows, 2, inputs)[:, 1] if strided else numbers(seed, rows, inputs)
    weight = numbers(seed + 1, outputs, inputs).t()
    ours = int8_products.multiply(x, int8_products.pack(weight))
    assert_equal_up_to_ties(ours, x, weight)


@settings(deadline=None)
@given(SEEDS, st.integers(1, 40), st.integers(1, 6), st.integers(1, 6))
def test_torch_product_of_few_and_many_rows(seed, rows, inputs, outputs):
    """On a GPU `torch._int_mm` takes more than 16 rows and multiples of 8; here the same code runs
    on the CPU."""
    x, weight = numbers(seed, rows, 8 * inputs), numbers(seed + 1, 8 * outputs, 8 * inputs).t()
    ops, bias = TorchLayerOps(), numbers(seed + 2, 8 * outputs)
    stored = ops.quantize(weight)
    assert_equal_up_to_ties(ops.product(x, stored, None), x, weight)
    assert_equal_up_to_ties(ops.product(x, stored, bias) - bias, x, weight)
    total = torch.ones(rows, 8 * outputs)
    ops.add_product(total, x, stored)
    assert_equal_up_to_ties(total - 1, x, weight)


@needs_vnni
@settings(deadline=None)
@given(SEEDS, st.integers(1, 40), st.integers(1, 60), st.integers(1, 60))
def test_layer_operations_take_int8_weights(seed, rows, inputs, outputs):
    """Codes that are exact: the product is that of the numbers, also in bfloat16."""
    weight = numbers(seed, outputs, inputs).sign().t()
    x, bias = numbers(seed + 1, rows, inputs).sign(), numbers(seed + 2, outputs)
    stored = OPS.quantize(weight)
    torch.testing.assert_close(OPS.product(x, stored, bias), x @ weight + bias)
    total = torch.ones(rows, outputs)
    OPS.add_product(total, x, stored)
    torch.testing.assert_close(total, x @ weight + 1)
    half = NumbaLayerOps(torch.bfloat16).product(x.bfloat16(), stored, None)
    assert half.dtype is torch.bfloat16
    torch.testing.assert_close(half, (x @ weight).bfloat16())


@needs_vnni
def test_rows_do_not_affect_each_other():
    x, stored = numbers(1, 3, 50), int8_products.pack(numbers(2, 20, 50).t())
    alone = int8_products.multiply(x, stored)
    x[0] *= 1e6
    torch.testing.assert_close(int8_products.multiply(x, stored)[1:], alone[1:], rtol=0, atol=0)


@needs_vnni
def test_row_of_zeros_is_zero():
    stored = int8_products.pack(numbers(2, 20, 50).t())
    assert not int8_products.multiply(torch.zeros(2, 50), stored).any()


def test_codes_match_worked_example(monkeypatch):
    """Two outputs with the largest numbers 2.54 and 0; also in chunks of one output."""
    weight = torch.tensor([[2.54, 0.0], [-1.27, 0.0], [0.011, 0.0]])
    for chunk in (2**24, 1):
        monkeypatch.setattr("services.worker.kernels.weights.CHUNK_NUMBERS", chunk)
        codes, scales = int8_codes(weight)
        assert codes.tolist() == [[127, -64, 1], [0, 0, 0]]  # −63.5 rounds to even
        assert scales[0].item() == pytest.approx(0.02) and scales[1].item() < 1e-30


def test_unsupported_size_is_a_sentence():
    with pytest.raises(ValueError, match=r"sizes that are multiples of 8, not 16 × 12"):
        TorchLayerOps().quantize(numbers(1, 12, 16).t())
