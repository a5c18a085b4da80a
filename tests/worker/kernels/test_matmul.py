"""Numba's products equal PyTorch's up to rounding, for any shapes, with one thread or many."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from services.worker.kernels.cpu import layer_ops
from services.worker.kernels.cpu.layer_ops import NumbaLayerOps, multiply
from services.worker.kernels.cpu.threads import numba_threads
from services.worker.kernels.reference.layer_ops import TorchLayerOps

OURS, THEIRS = NumbaLayerOps(torch.float32), TorchLayerOps()
SEEDS = st.integers(0, 2**31)
ROWS = st.one_of(st.integers(0, 15), st.sampled_from([47, 48, 49, 103]))  # a task has 48
COLUMNS = st.one_of(st.integers(1, 40), st.integers(60, 150))  # tiles of 64, of 16, and the rest


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@settings(deadline=None)
@given(SEEDS, ROWS, st.integers(1, 70), COLUMNS, st.booleans(), st.booleans())
def test_matmul_of_any_shape(seed, rows, numbers_in, columns, added, many):
    x, weight = numbers(seed, rows, numbers_in), numbers(seed + 1, numbers_in, columns)
    before = numbers(seed + 2, rows, columns)
    out = before.clone()
    multiply(x, weight, out, added, many)
    expected = x.double() @ weight.double() + (before if added else 0)
    torch.testing.assert_close(out, expected.float(), rtol=2e-5, atol=2e-5)


@settings(deadline=None)
@given(SEEDS, ROWS, st.integers(1, 70), COLUMNS, st.booleans(), st.booleans())
def test_bfloat16_matmul_sums_in_float32_and_rounds_once(
    seed, rows, numbers_in, columns, added, many
):
    x, weight = (
        numbers(seed, rows, numbers_in).bfloat16(),
        numbers(seed + 1, numbers_in, columns).bfloat16(),
    )
    before = numbers(seed + 2, rows, columns).bfloat16()
    out = before.clone()
    multiply(x, weight, out, added, many)
    exact = x.double() @ weight.double() + (before.double() if added else 0)
    # Half of a bfloat16's last bit, and the difference of float32 sums at its boundary.
    torch.testing.assert_close(out.double(), exact, rtol=2**-8, atol=1e-5)


def test_matmul_ignores_previous_output_unless_added():
    x, weight, out = numbers(1, 3, 5), numbers(2, 5, 21), torch.full((3, 21), torch.nan)
    multiply(x, weight, out, added=False, many=False)
    torch.testing.assert_close(out, x @ weight)


def test_matmul_writes_only_its_rows_and_columns():
    x, weight, room = numbers(1, 5, 8), numbers(2, 8, 27), torch.full((9, 37), -1.0)
    multiply(x, weight, room[2:7, 3:30], added=False, many=False)
    torch.testing.assert_close(room[2:7, 3:30], x @ weight)
    room[2:7, 3:30] = -1
    assert torch.all(room == -1)


@pytest.mark.parametrize("rows", [0, 1, 2, 7, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_products_equal_the_library_s(rows, dtype):
    ours = NumbaLayerOps(dtype)
    x, weight = numbers(1, rows, 96).to(dtype), numbers(2, 96, 130).to(dtype)
    bias, total = numbers(3, 130).to(dtype), numbers(4, rows, 130).to(dtype)
    near = 2e-5 if dtype is torch.float32 else 2e-2
    for each in (None, bias):
        made, expected = ours.product(x, weight, each), THEIRS.product(x, weight, each)
        torch.testing.assert_close(made, expected, rtol=near, atol=near)
    sums = total.clone()
    ours.add_product(sums, x, weight)
    THEIRS.add_product(total, x, weight)
    torch.testing.assert_close(sums, total, rtol=near, atol=near)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Rows of each product that matmul.py computes, and whether it uses many threads."""
    asked: list[tuple[int, bool]] = []

    def note(x: Tensor, weight: Tensor, out: Tensor, added: bool, many: bool) -> None:
        asked.append((len(x), many))

    monkeypatch.setattr(layer_ops, "multiply", note)
    return asked


def test_other_layouts_and_processors_use_the_library(asked):
    x = numbers(1, 4, 32)
    OURS.product(x, numbers(2, 64, 32).t(), None)
    NumbaLayerOps(torch.float32, multiplies=False).product(x, numbers(2, 32, 64), None)
    assert asked == []
    OURS.product(x, numbers(2, 32, 64), None)
    assert asked == [(4, False)]


def test_single_float32_row_and_many_bfloat16_rows_use_the_library(asked):
    weight = numbers(1, 100, 100)
    for rows in (1, 2, 131):
        OURS.product(numbers(2, rows, 100), weight, None)
        x = numbers(2, rows, 100).bfloat16()
        NumbaLayerOps(torch.bfloat16).product(x, weight.bfloat16(), None)
    assert [rows for rows, _ in asked] == [
        1,
        2,
        2,
        131,
    ]  # the first product, and one of 2 rows in bfloat16


@pytest.mark.parametrize("threads", [1, 2])
def test_large_products_use_another_thread(asked, threads, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    for rows in (5, 6):
        OURS.product(numbers(1, rows, 256), numbers(2, 256, 390), None)
    assert asked == [(5, False), (6, min(threads, numba_threads()) > 1)]
