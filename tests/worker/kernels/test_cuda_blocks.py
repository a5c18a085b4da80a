"""Triton's block copies in the interpreter: bit for bit, or INT8 within half a step."""

import random

import pytest
import torch

from benchmarks.gpu.copies import (
    CopyCase,
    at_rest_faults,
    copy_cases,
    make_layer,
    round_trip_faults,
    staging,
)
from services.worker.kernels.cuda.blocks import TritonBlocks
from services.worker.kernels.reference.blocks import TorchBlocks
from services.worker.kv.copies import StagedLayer

CPU = torch.device("cpu")


@pytest.fixture
def seed():
    """A new seed in each run; pytest prints it if a test fails."""
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    return seed


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("kv_heads", "head_dim"), [(2, 32), (1, 80)])
def test_block_round_trip_is_bit_exact(kv_heads, head_dim, dtype, seed):
    case = CopyCase("", kv_heads, head_dim, dtype)
    assert round_trip_faults(case, seed, CPU, int8=False) == []


@pytest.mark.parametrize(("kv_heads", "head_dim"), [(2, 32), (1, 80)])
def test_live_int8_block_round_trip_is_bit_exact(kv_heads, head_dim, seed):
    case = CopyCase("", kv_heads, head_dim, torch.float32)
    assert round_trip_faults(case, seed, CPU, int8=True) == []


@pytest.mark.parametrize("case", copy_cases(1, 32), ids=lambda c: c.name)
def test_quantized_blocks_are_within_half_a_step(case, seed):
    assert at_rest_faults(case, seed, CPU) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_quantized_blocks_with_a_head_of_80_and_two_heads(dtype, seed):
    assert at_rest_faults(CopyCase("", 2, 80, dtype, filled=(16, 5)), seed, CPU) == []


@pytest.mark.parametrize("case", copy_cases(1, 32), ids=lambda c: c.name)
def test_quantized_blocks_equal_pytorch_s(case, seed):
    """Codes and ranges have the same bits, so that each can read what the other wrote."""
    layer = make_layer(case, torch.Generator().manual_seed(seed))
    blocks, filled = torch.tensor([5, 2]), torch.tensor([16, 9])
    staged = []
    for copies in (TorchBlocks(), TritonBlocks(CPU)):
        out = StagedLayer(
            staging(2, (2, 1, 16, 32), torch.int8, CPU),
            ranges=staging(2, (2, 1, 2, 32), case.dtype, CPU),
        )
        copies.gather(layer, blocks, filled, out)
        staged.append(out)
    theirs, ours = staged
    assert theirs.ranges is not None and ours.ranges is not None
    assert torch.equal(theirs.ranges, ours.ranges)
    assert torch.equal(theirs.data, ours.data)


def test_no_blocks_launch_nothing():
    layer = make_layer(CopyCase("", 1, 32, torch.float32), torch.Generator().manual_seed(0))
    nothing, before = torch.zeros(0, dtype=torch.int64), layer.data.clone()
    staged = StagedLayer(torch.zeros(0, 2, 1, 16, 32))
    TritonBlocks(CPU).gather(layer, nothing, nothing, staged)
    TritonBlocks(CPU).scatter(layer, nothing, staged)
    assert torch.equal(layer.data, before)
