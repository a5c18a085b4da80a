"""Recordable decode attention: fixed grids and pointers, against float64."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.gpu.checks import (
    BOUNDS,
    DECODES,
    Case,
    attention_error,
    dense,
    poisoned_memory,
    relative,
    run_fixed,
    store_faults,
)
from services.worker.kernels.cuda.recordable import RecordableDecodes
from services.worker.kernels.cuda.work_split import count_splits, spare_splits
from services.worker.kernels.interface import AttentionOptions
from services.worker.kv.cache import KVLayer
from services.worker.requests.types.batch import DecodeRows, StepBatch
from services.worker.requests.types.prompt import Prompt
from services.worker.requests.types.sequence import Sequence
from tests.worker.engine.tape_recorder import TapeRecorder

CPU = torch.device("cpu")
OPTIONS = AttentionOptions(0.2)


@pytest.fixture
def seed():
    """A new seed in each run; pytest prints it if a test fails."""
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    return seed


@pytest.mark.parametrize("case", DECODES, ids=lambda c: c.name)
def test_recorded_decodes_with_padding(case: Case, seed):
    """A thread block that is not used would divide by zero splits if it continued."""
    with np.errstate(divide="raise"):
        outcome = run_fixed(case, seed, CPU, padding=seed % 4)
    assert store_faults(outcome) == []
    assert attention_error(outcome) < BOUNDS[case.dtype]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_recorded_decodes_in_half_precision(dtype, seed):
    case = Case("", ((90, 1), (31, 1), (500, 1)), 4, 2, 64, dtype)
    assert attention_error(run_fixed(case, seed, CPU, padding=2)) < BOUNDS[dtype]


@pytest.mark.parametrize("processors", [1, 3, 40])
def test_splits_do_not_change_recorded_results(processors, seed):
    case = Case("splits", ((1100, 1), (300, 1), (2, 1)), 4, 2, 32)
    assert attention_error(run_fixed(case, seed, CPU, 1, processors)) < BOUNDS[torch.float32]


@given(
    st.lists(st.integers(1, 200_000), min_size=1, max_size=60),
    st.sampled_from([None, 1, 100, 5_000]),
    st.sampled_from([16, 64, 128]),
    st.integers(1, 64),
    st.integers(1, 200),
)
def test_recorded_grid_fits_every_batch(lengths, window, tile, heads, processors):
    splits = count_splits(np.array(lengths), window, tile, heads, processors)
    assert splits.sum() <= len(lengths) + spare_splits(heads, processors)


def sequence_of(length: int) -> Sequence:
    sequence = Sequence.start(Prompt("r", (1,) * length, length, 9), 9)
    sequence.computed = length - 1
    return sequence


class Growing:
    """Decoding rows, their contexts in float64, and a recorded step of `size` rows."""

    def __init__(self, lengths: list[int], size: int, window: int | None, seed: int):
        self.random = torch.Generator().manual_seed(seed)
        self.block, self.heads, self.dim, self.size = 2, 2, 32, size
        self.options = AttentionOptions(0.2, window)
        order = torch.randperm(400, generator=self.random).tolist()
        self.pad_block, self.free = order[0], order[1:]
        self.layer = KVLayer(torch.full((2, 400, self.heads, self.block, self.dim), torch.nan))
        self.q, self.k, self.v = torch.zeros(3, size, self.heads, self.dim)
        self.out = torch.zeros_like(self.q)
        self.positions = torch.zeros(size, dtype=torch.long)
        self.slots = torch.full((size,), self.pad_block * self.block)
        self.kernels = RecordableDecodes(self.block, CPU, size, 40, processors=2)
        self.kernels.prepare(StepBatch(DecodeRows([], [], self.block), []), self.slots)
        self.replay = TapeRecorder().record(self.work)
        self.begin(lengths)

    def work(self) -> None:
        self.kernels.begin(self.positions)
        self.kernels.store(self.layer, self.k, self.v)
        out = self.kernels.attend(self.layer, self.q, self.k, self.v, self.options)
        self.out.copy_(out)

    def begin(self, lengths: list[int]) -> None:
        """Replaces the rows by others."""
        tables = [[self.free.pop() for _ in range(-(-n // self.block))] for n in lengths]
        self.rows = DecodeRows([sequence_of(n) for n in lengths], tables, self.block)
        shape = (self.heads, self.dim)
        self.contexts = [torch.randn(2, n - 1, *shape, generator=self.random) for n in lengths]
        for table, context in zip(tables, self.contexts, strict=True):
            for at in range(context.shape[1]):
                block, offset = table[at // self.block], at % self.block
                self.layer.data[:, block, :, offset] = context[:, at]

    def step(self, recorded: bool = True) -> None:
        """Adds a token to each row; checks the result if the step is recorded."""
        rows = len(self.rows)
        self.q[:], self.k[:], self.v[:] = torch.randn(3, *self.q.shape, generator=self.random)
        self.positions.zero_()
        self.positions[:rows] = torch.from_numpy(self.rows.positions)
        self.slots.fill_(self.pad_block * self.block)
        self.slots[:rows] = torch.from_numpy(self.rows.slots)
        news = torch.stack([self.k, self.v], 1)[:rows]
        self.contexts = [
            torch.cat([c, new[:, None]], 1) for c, new in zip(self.contexts, news, strict=True)
        ]
        if recorded:
            self.kernels.prepare(StepBatch(self.rows, []), self.slots)
            with poisoned_memory():
                self.replay()
            assert self.out.isfinite().all(), "padding gives NaN"
            expected = [
                dense(self.q[i : i + 1].double(), c[0].double(), c[1].double(), self.options)
                for i, c in enumerate(self.contexts)
            ]
            assert relative(self.out[:rows].double(), torch.cat(expected)) < 1e-6
        else:
            slots = self.slots[:rows]
            at = (slice(None), slots // self.block, slice(None), slots % self.block)
            self.layer.data[at] = news
        for row in self.rows.advance():
            self.rows.set_block(int(row), self.free.pop())
        self.rows.set_drawn([0] * rows)


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 9])
def test_recording_of_padding_serves_growing_and_changing_rows(window, seed):
    """Rows grow from block to block and beyond the table's width, skip recorded steps, and are
    replaced by fewer and longer rows, and by the largest number of rows."""
    growing = Growing([19, 7, 1], 4, window, seed)
    for step in range(12):
        growing.step(recorded=step not in (4, 5))
    for lengths in ([50], [33, 32, 2, 1]):
        growing.begin(lengths)
        for _ in range(4):
            growing.step()


def test_work_is_split_again_for_every_batch():
    """Other splits give the same answer, but would leave a long row to one thread block. Two rows
    of 4,000 and 10 tokens, one of 700, none; 2 heads on 2 processors, tiles of 32."""
    growing = Growing([2], 3, None, 0)
    (plan,) = growing.kernels._plans.values()
    for lengths in ([4_000, 10], [700], []):
        tables = [[0] * 2_000 for _ in lengths]
        rows = DecodeRows([sequence_of(n) for n in lengths], tables, 2)
        growing.kernels.prepare(StepBatch(rows, []), growing.slots)
        wanted = count_splits(np.array(lengths, np.int64), None, 32, 2, 2).tolist()
        assert (plan.cut.tiles.keys == 32 and sum(wanted) > len(lengths)) or not lengths
        counts = [*wanted, *[1] * (3 - len(lengths))]
        items = plan.items.view(-1, 3)
        assert items[: sum(counts), 0].tolist() == np.repeat(range(3), counts).tolist()
        assert not items[sum(counts) :, 2].any(), "unused items have 0 splits"
        assert plan.ranges.view(-1, 2)[:, 1].tolist() == counts


def test_host_number_is_frozen_in_a_recording():
    """The tape freezes what a graph freezes, so that the other tests can detect a wrong step."""
    host, x, y = [1.0], torch.ones(2), torch.zeros(2)

    def work() -> None:
        y.copy_(x * host[0])

    replay = TapeRecorder().record(work)
    host[0] = 5.0
    x.fill_(3.0)
    replay()
    assert y.tolist() == [3.0, 3.0]


def test_waiting_call_cannot_be_recorded():
    with pytest.raises(AssertionError, match="the host waits"):
        TapeRecorder().record(lambda: print(torch.ones(1).item()))
