"""Triton's store and attention kernels in the interpreter, against float64, with poisoned memory
around the data."""

import random

import numpy as np
import pytest
import torch

from benchmarks.gpu.checks import (
    BOUNDS,
    CASES,
    Case,
    attention_error,
    dense,
    in_types,
    layout_of,
    poisoned_memory,
    relative,
    run_step,
    store_faults,
)
from services.worker.kernels.cuda.attention import TritonAttention
from services.worker.kernels.interface import AttentionOptions
from services.worker.kv.cache import KVLayer
from services.worker.requests.types.batch import DecodeRows, StepBatch
from services.worker.requests.types.prompt import Prompt
from services.worker.requests.types.sequence import Sequence

CPU = torch.device("cpu")


@pytest.fixture
def seed():
    """A new seed in each run; pytest prints it if a test fails."""
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    return seed


@pytest.mark.parametrize(
    "case", [c for case in CASES for c in in_types(case)], ids=lambda c: c.name
)
def test_step_stores_and_attends(case: Case, seed):
    outcome = run_step(case, seed, CPU)
    assert store_faults(outcome) == []
    assert attention_error(outcome) < BOUNDS[case.dtype]


@pytest.mark.parametrize("processors", [1, 3, 400])
def test_splits_do_not_change_results(processors, seed):
    """One split per row, a few, or as many as its tiles allow."""
    case = Case("splits", ((1100, 1), (300, 1), (2, 1)), 4, 2, 32)
    outcome = run_step(case, seed, CPU, processors)
    assert attention_error(outcome) < BOUNDS[torch.float32]


def test_checks_detect_a_wrong_result(seed):
    outcome = run_step(CASES[0], seed, CPU)
    outcome.out[0, 0, 0] += 0.01
    assert attention_error(outcome) > BOUNDS[torch.float32]
    outcome.after.data[0, 0, 0, 0, 0] = outcome.after.data.nan_to_num()[0, 0, 0, 0, 0] + 1
    assert store_faults(outcome)


def sequence_of(length: int) -> Sequence:
    sequence = Sequence.start(Prompt("r", (1,) * length, length, 9), 9)
    sequence.computed = length - 1
    return sequence


@pytest.mark.slow
def test_continued_decode_rows(seed):
    """The same rows decode step after step: the tables on the device are updated at new blocks, in
    a larger table, and after a step that was not prepared."""
    generator = torch.Generator().manual_seed(seed)
    lengths, size, heads, dim = [19, 7, 1], 2, 2, 32
    free = torch.randperm(200, generator=generator).tolist()
    tables = [[free.pop() for _ in range(-(-n // size))] for n in lengths]
    rows = DecodeRows([sequence_of(n) for n in lengths], tables, size)
    layer = KVLayer(torch.full((2, 200, heads, size, dim), torch.nan))
    contexts = [torch.randn(2, n - 1, heads, dim, generator=generator) for n in lengths]
    for table, context in zip(tables, contexts, strict=True):
        for position in range(context.shape[1]):
            layer.data[:, table[position // size], :, position % size] = context[:, position]
    kernels = TritonAttention(size, CPU, torch.float32)
    for step in range(24):
        q, k, v = torch.randn(3, 3, heads, dim, generator=generator)
        with poisoned_memory():
            if step not in (11, 12):
                kernels.prepare(StepBatch(rows, []), torch.from_numpy(rows.slots))
                kernels.store(layer, k, v)
                out = kernels.attend(layer, q, k, v, AttentionOptions(0.2))
            else:
                block = torch.from_numpy(rows.slots)
                layer.data[:, block // size, :, block % size] = torch.stack([k, v], 1)
        news = torch.stack([k, v], 1)
        contexts = [torch.cat([c, new[:, None]], 1) for c, new in zip(contexts, news, strict=True)]
        if step not in (11, 12):
            expected = [
                dense(q[i : i + 1].double(), c[0].double(), c[1].double(), AttentionOptions(0.2))
                for i, c in enumerate(contexts)
            ]
            assert relative(out.double(), torch.cat(expected)) < 1e-6
        for row in rows.advance():
            rows.set_block(int(row), free.pop())


def test_prepared_step_serves_every_layer(seed):
    """Layers with other heads, windows and soft-caps use one `prepare`."""
    case = Case("", ((300, 1), (40, 1), (0, 20), (60, 9)), 4, 2, 32)
    generator = torch.Generator().manual_seed(seed)
    layout = layout_of(case, generator)
    kernels = TritonAttention(case.block_tokens, CPU, torch.float32)
    kernels.prepare(layout.batch, layout.new)
    for heads, kv_heads, window in [(4, 2, None), (4, 4, 30), (6, 1, None), (4, 2, 200)]:
        size = (2, layout.blocks, kv_heads, case.block_tokens, case.head_dim)
        layer = KVLayer(torch.randn(size, generator=generator))
        q = torch.randn(len(layout.new), heads, case.head_dim, generator=generator)
        options = AttentionOptions(0.2, window)
        with poisoned_memory():
            out = kernels.attend(layer, q, q, q, options)
        values = layer.data.transpose(2, 3).flatten(1, 2).double()
        row = 0
        tokens = [1, 1, *(chunk.tokens for chunk in layout.batch.chunks)]
        for slots, count in zip(layout.contexts, tokens, strict=True):
            expected = dense(
                q[row : row + count].double(), values[0, slots], values[1, slots], options
            )
            assert relative(out[row : row + count].double(), expected) < 1e-6
            row += count


def test_int8_handles_zeros_denormals_and_the_largest():
    k = torch.zeros(4, 1, 32)
    k[1, 0, 3] = 1e-42
    k[2] = 3.4e38 * torch.tensor([1.0, -1.0]).repeat(16)
    k[3] = torch.linspace(-1, 1, 32)
    layer = KVLayer(
        torch.full((2, 2, 1, 4, 32), 99, dtype=torch.int8), torch.full((2, 2, 1, 4), torch.nan)
    )
    kernels = TritonAttention(4, CPU, torch.float32)
    empty = StepBatch(DecodeRows([], [], 4), [])
    kernels.prepare(empty, torch.arange(4))
    kernels.store(layer, k, k)
    assert layer.scales is not None
    scales, steps = layer.scales[0, 0, 0], layer.data[0, 0, 0]
    back = steps.float() * scales[:, None]
    assert scales[0] == 0 and not steps[0].any()
    assert back.isfinite().all()
    assert (back[1] - k[1, 0]).abs().max() <= 1.2e-38
    torch.testing.assert_close(back[2:], k[2:, 0], rtol=1e-2, atol=0.5 / 127)
    assert np.array_equal(layer.data[1], layer.data[0])
