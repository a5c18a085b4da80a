"""Low-rank products of Numba, of Triton in the interpreter and of PyTorch: as computed row by
row."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from services.worker.kernels.cpu.low_rank import NumbaLowRank
from services.worker.kernels.cuda.low_rank import TritonLowRank
from services.worker.kernels.low_rank import NO_SLOT, AdapterRows, LowRankMap, LowRankProducts
from services.worker.kernels.reference.low_rank import TorchLowRank

CPU = torch.device("cpu")
SLOTS, RANK, INPUTS, WIDTHS = 4, 7, 70, (35, 3, 66)
PRODUCTS: dict[str, LowRankProducts] = {
    "numba": NumbaLowRank(), "torch": TorchLowRank(), "triton": TritonLowRank(CPU),
}  # fmt: skip
# Slot 0 changes all parts with different ranks, 1 one part, 2 none; 3 is empty.
RANKS: dict[int, dict[int, int]] = {0: {0: 7, 1: 2, 2: 5}, 1: {2: 3}, 2: {}}
# One row of an adapter, a few scattered ones, and a group as large as a chunk of a prompt.
SLOTS_OF_ROWS = st.lists(st.sampled_from([NO_SLOT, 0, 1, 2, 3]), max_size=12)


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make(dtype: torch.dtype) -> LowRankMap:
    change = LowRankMap(SLOTS, RANK, INPUTS, WIDTHS, dtype, CPU)
    for slot, parts in RANKS.items():
        change.set(
            slot,
            {
                part: (numbers(slot, rank, INPUTS), numbers(part, WIDTHS[part], rank).t())
                for part, rank in parts.items()
            },
        )
    return change


def expected(x: Tensor, out: Tensor, slots: list[int], dtype: torch.dtype) -> Tensor:
    result = out.double()
    for row, slot in enumerate(slots):
        for part, rank in RANKS.get(slot, {}).items():
            down, up = numbers(slot, rank, INPUTS), numbers(part, WIDTHS[part], rank)
            start = sum(WIDTHS[:part])
            change = up.to(dtype).double() @ (down.to(dtype).double() @ x[row].double())
            result[row, start : start + WIDTHS[part]] += change
    return result


def check(name: str, dtype: torch.dtype, slots: list[int], tolerance: dict[str, Any]) -> None:
    x, out = numbers(1, len(slots), INPUTS).to(dtype), numbers(2, len(slots), sum(WIDTHS)).to(dtype)
    rows = AdapterRows.by_slot(np.array(slots, np.int64), CPU)
    before = out.clone()
    if rows is None:
        assert set(slots) <= {NO_SLOT}
        return
    PRODUCTS[name].add(make(dtype), out, x, rows)
    torch.testing.assert_close(out.double(), expected(x, before, slots, dtype), **tolerance)
    unchanged = [row for row, slot in enumerate(slots) if slot not in (0, 1)]
    assert torch.equal(out[unchanged], before[unchanged])


@settings(deadline=None)
@given(SLOTS_OF_ROWS, st.integers(0, 40))
def test_numba_rows_of_any_adapters(slots: list[int], more: int) -> None:
    check("numba", torch.float32, [*slots, *[1] * more, *slots], {"rtol": 1e-5, "atol": 1e-4})


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_of_scattered_and_adjacent_adapters(name: str, dtype: torch.dtype) -> None:
    slots = [0, NO_SLOT, 1, 0, 2, 3, *[0] * 20, NO_SLOT, *[1] * 17, 0]
    tolerance = {"rtol": 1e-5, "atol": 1e-4}
    if dtype is torch.bfloat16:  # the low-rank numbers, which PyTorch rounds, reach 30
        tolerance = {"rtol": 2**-6, "atol": 0.5}
    check(name, dtype, slots, tolerance)
