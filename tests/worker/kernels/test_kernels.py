"""Attention kernels against dense attention in float64."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from services.worker.kernels.cpu import attention as numba_attention
from services.worker.kernels.cpu import prefill_loops
from services.worker.kernels.cpu.attention import NumbaAttention
from services.worker.kernels.cpu.threads import numba_threads
from services.worker.kernels.interface import AttentionKernels, AttentionOptions
from services.worker.kernels.reference import attention as torch_attention
from services.worker.kernels.reference.attention import TorchAttention
from services.worker.kernels.reference.paging import quantize
from services.worker.kv.cache import KVLayer
from services.worker.requests.types.batch import DecodeRows, PrefillChunk, StepBatch
from services.worker.requests.types.prompt import Prompt
from services.worker.requests.types.sequence import Sequence
from tests.examples import examples

BLOCK, DIM = 4, 8
STARTED = numba_threads()  # before a test changes it


@dataclass
class Case:
    """Sequences as (context before the step, tokens in the step); a decode has one token."""

    shapes: list[tuple[int, int]]
    heads: tuple[int, int]  # of queries, of keys and values
    options: AttentionOptions
    block: int = BLOCK
    dim: int = DIM


def dense(q: Tensor, k: Tensor, v: Tensor, start: int, options: AttentionOptions) -> Tensor:
    """Dense attention of q [n, heads, dim] at positions start…, over k and v [start + n, kv_heads,
    dim]."""
    group = q.shape[1] // k.shape[1]
    q, k, v = (
        q.double(),
        k.double().repeat_interleave(group, 1),
        v.double().repeat_interleave(group, 1),
    )
    scores = torch.einsum("qhd,khd->hqk", q, k) * options.scale
    if options.softcap:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    for row in range(len(q)):
        for key in range(len(k)):
            distance = start + row - key
            if distance < 0 or (options.window and distance >= options.window):
                scores[:, row, key] = -torch.inf
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).float()


def sequence_of(length: int) -> Sequence:
    sequence = Sequence.start(Prompt("r", (1,) * length, length, 9), 9)
    sequence.computed = length - 1
    return sequence


def layer_of(values: Tensor, int8: bool) -> KVLayer:
    """A layer with values [2, blocks, kv_heads, tokens, dim]."""
    return KVLayer(*quantize(values)) if int8 else KVLayer(values.clone())


def read(layer: KVLayer) -> Tensor:
    """The content of a layer as [2, slots, kv_heads, dim]."""
    values = layer.data if layer.scales is None else layer.data * layer.scales[..., None]
    return values.transpose(2, 3).flatten(1, 2)


@dataclass
class Answer:
    """The result of the kernels, that of dense attention over the stored values, and that over the
    values before they were stored."""

    got: Tensor
    stored: Tensor
    given: Tensor


CPU = torch.device("cpu")


def torch_kernels(block: int) -> AttentionKernels:
    return TorchAttention(block, CPU, torch.float32)


def attend(
    case: Case,
    seed: int,
    int8: bool = False,
    make: Callable[[int], AttentionKernels] = torch_kernels,
) -> Answer:
    """Attention for random states in scattered blocks."""
    heads, kv_heads = case.heads
    block, dim = case.block, case.dim
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-(start + n) // block) for start, n in case.shapes]
    scattered = torch.randperm(sum(counts) + 3, generator=generator).tolist()
    tables = [[scattered.pop() for _ in range(count)] for count in counts]
    values = torch.randn(2, sum(counts) + 3, kv_heads, block, dim, generator=generator)
    layer = layer_of(values, int8)
    decodes = [i for i, (_, n) in enumerate(case.shapes) if n == 1]
    rows = DecodeRows([sequence_of(case.shapes[i][0] + 1) for i in decodes],
                      [tables[i] for i in decodes], block)  # fmt: skip
    decodes.sort(key=lambda i: -case.shapes[i][0])  # as the rows are
    chunked = [i for i, (_, n) in enumerate(case.shapes) if n > 1]
    chunks = [
        PrefillChunk(sequence_of(sum(case.shapes[i])), case.shapes[i][0], sum(case.shapes[i]),
              torch.tensor(tables[i]).numpy())
        for i in chunked
    ]  # fmt: skip
    total = sum(n for _, n in case.shapes)
    q = torch.randn(total, heads, dim, generator=generator)
    k, v = torch.randn(2, total, kv_heads, dim, generator=generator)

    def slots(i: int) -> list[int]:
        return [number * block + offset for number in tables[i] for offset in range(block)]

    spans = [(i, *case.shapes[i]) for i in [*decodes, *chunked]]
    written = torch.tensor([s for i, start, n in spans for s in slots(i)[start : start + n]])
    expected = read(KVLayer(values))
    expected[:, written] = torch.stack([k, v])
    kernels = make(block)
    kernels.prepare(StepBatch(rows, chunks), written)
    kernels.store(layer, k, v)
    got = kernels.attend(layer, q, k, v, case.options)

    in_blocks = expected.view(2, -1, block, kv_heads, dim).transpose(2, 3)
    assert torch.equal(read(layer), read(layer_of(in_blocks, int8))), "stored in the right slot"

    def dense_over(keys: Tensor, values: Tensor) -> Tensor:
        parts, row = [], 0
        for i, start, n in spans:
            context = slots(i)[: start + n]
            own = q[row : row + n]
            parts.append(dense(own, keys[context], values[context], start, case.options))
            row += n
        return torch.cat(parts)

    return Answer(got, dense_over(*read(layer)), dense_over(*expected))


CASES = st.builds(
    Case,
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9)), min_size=1, max_size=8),
    st.sampled_from([(4, 4), (4, 2), (6, 1)]),
    st.builds(
        AttentionOptions,
        st.sampled_from([0.2, 1.0]),
        st.sampled_from([None, 1, 3, 16, 100]),
        st.sampled_from([None, 2.0]),
    ),
)

# Tokens of a block and numbers of a head: fewer than a vector has lanes, more, and not a multiple.
SHAPES = [(BLOCK, DIM), (16, 40)]


def shaped(case: Case, shape: tuple[int, int]) -> Case:
    return replace(case, block=shape[0], dim=shape[1])


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize(
    ("padding", "group_tokens"), [(0, 4096), (8, 4096), (1024, 4096), (1024, 20)]
)
@settings(deadline=None, max_examples=examples(40))
@given(case=CASES, seed=st.integers(0, 99))
def test_attention_equals_dense_attention(padding, group_tokens, int8, case, seed):
    """Padding and size divide decodes into no groups, some groups, or one group per row."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_attention, "PADDING_TOKENS", padding)
        patch.setattr(torch_attention, "GROUP_BYTES", group_tokens * 512)
        answer = attend(case, seed, int8)
    torch.testing.assert_close(answer.got, answer.stored, rtol=0, atol=2e-5)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("tiles", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("rows_max", [0, 5, 48])
@pytest.mark.parametrize("thread_work", [0, 2**40])
@settings(deadline=None, max_examples=examples(20))
@given(case=st.builds(shaped, CASES, st.sampled_from(SHAPES)), seed=st.integers(0, 99))
def test_in_place_attention_equals_dense_attention(thread_work, rows_max, tiles, int8, case, seed):
    """With one thread and two; chunks are computed as rows, as tiles, or by PyTorch."""

    def make(block: int) -> AttentionKernels:
        return NumbaAttention(block, torch.float32, tiles=tiles)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(numba_attention, "MAX_ROW_TOKENS", rows_max)
        patch.setattr(numba_attention, "MAX_ROW_TOKENS_BEFORE_TORCH", rows_max)
        patch.setattr(numba_attention, "THREAD_WORK", thread_work)
        patch.setattr(torch, "get_num_threads", lambda: 2)
        answer = attend(case, seed, int8, make)
    torch.testing.assert_close(answer.got, answer.stored, rtol=0, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("options", [
    AttentionOptions(0.3), AttentionOptions(0.3, 70), AttentionOptions(0.3, 1, 2.0),
])  # fmt: skip
@pytest.mark.parametrize("threads", [1, 2])
def test_long_chunks_over_many_tiles(threads, options, group, int8, monkeypatch):
    """Many tiles of queries, of keys, and of both; beside a decode, with and without a context."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    taken: list[int] = []

    def reported(*given: Any) -> None:
        taken.append(given[-1])
        attend_chunk(*given)

    attend_chunk = prefill_loops.attend
    monkeypatch.setattr(prefill_loops, "attend", reported)
    case = Case([(0, 300), (130, 200), (3, 1), (63, 65)], (2 * group, 2), options, 16, 24)
    answer = attend(case, 7, int8, lambda block: NumbaAttention(block, torch.float32, tiles=True))
    torch.testing.assert_close(answer.got, answer.stored, rtol=0, atol=2e-5)
    few = 1 if options.window == 1 else threads  # too little work for a second thread
    assert len(taken) == 3 and taken[0] == min(few, STARTED)


@pytest.mark.slow
@pytest.mark.parametrize("int8", [False, True])
def test_long_chunks_in_bfloat16(int8):
    """Against the same numbers in float32: only the rounding of the answer differs."""
    tokens, block, dim = 150, 16, 24
    generator = torch.Generator().manual_seed(5)
    q = torch.randn(tokens, 4, dim, generator=generator).bfloat16()
    k, v = torch.randn(2, tokens, 2, dim, generator=generator).bfloat16()
    chunk = PrefillChunk(sequence_of(tokens), 0, tokens, torch.randperm(10).numpy())
    slots = torch.from_numpy(chunk.table).repeat_interleave(block) * block
    slots = (slots + torch.arange(block).repeat(10))[:tokens]
    got = []
    for dtype in (torch.bfloat16, torch.float32):
        kernels = NumbaAttention(block, dtype, tiles=True)
        layer = layer_of(torch.zeros(2, 10, 2, block, dim, dtype=dtype), int8)
        kernels.prepare(StepBatch(DecodeRows([], [], block), [chunk]), slots)
        kernels.store(layer, k.to(dtype), v.to(dtype))
        got.append(
            kernels.attend(layer, q.to(dtype), k.to(dtype), v.to(dtype), AttentionOptions(0.3))
        )
    assert got[0].dtype is torch.bfloat16
    torch.testing.assert_close(got[0], got[1].bfloat16(), rtol=0, atol=0)
    expected = dense(q, k, v, 0, AttentionOptions(0.3))
    torch.testing.assert_close(got[1], expected, rtol=0, atol=0.1 if int8 else 2e-5)


def test_extreme_scores_and_nan_queries():
    """Weights are relative to the largest score, at any position. No query affects another."""
    tokens, block = 200, 16
    generator = torch.Generator().manual_seed(1)
    q, k, v = 12 * torch.randn(3, tokens, 2, DIM, generator=generator)
    chunk = PrefillChunk(sequence_of(tokens), 0, tokens, torch.arange(13).numpy())
    layer = KVLayer(
        torch.full((2, 13, 2, block, DIM), torch.nan)
    )  # memory after the tokens is not read
    kernels = NumbaAttention(block, torch.float32, tiles=True)
    kernels.prepare(StepBatch(DecodeRows([], [], block), [chunk]), torch.arange(tokens))
    kernels.store(layer, k, v)
    expected = dense(q, k, v, 0, AttentionOptions(1.0))
    got = kernels.attend(layer, q, k, v, AttentionOptions(1.0))
    torch.testing.assert_close(got, expected, rtol=5e-4, atol=5e-4)
    q[[17, 150]] = torch.nan
    others = [token for token in range(tokens) if token not in (17, 150)]
    spoilt = kernels.attend(layer, q, k, v, AttentionOptions(1.0))
    assert torch.equal(spoilt[others], got[others])


def test_in_place_attention_follows_advancing_rows():
    """The same batch advances by a token per step, beyond the end of a block and the width of the
    tables."""
    steps, kv_heads = 45, 2
    layer = layer_of(torch.randn(2, 64, kv_heads, BLOCK, DIM), int8=False)
    blocks = iter(torch.randperm(64).tolist())
    lengths = [9, 3]
    sequences = [sequence_of(length) for length in lengths]
    tables = [[next(blocks) for _ in range(-(-length // BLOCK))] for length in lengths]
    rows = DecodeRows(sequences, tables, BLOCK)
    kernels = NumbaAttention(BLOCK, torch.float32)
    options = AttentionOptions(0.3)
    for step in range(steps):
        q = torch.randn(2, 4, DIM)
        k, v = torch.randn(2, 2, kv_heads, DIM)
        kernels.prepare(StepBatch(rows, []), torch.from_numpy(rows.slots))
        kernels.store(layer, k, v)
        got = kernels.attend(layer, q, k, v, options)
        for row, table in enumerate(tables):
            length = lengths[row] + step
            keys, values = layer.data[:, table].transpose(2, 3).reshape(2, -1, kv_heads, DIM)
            expected = dense(q[row : row + 1], keys[:length], values[:length], length - 1, options)
            torch.testing.assert_close(got[row : row + 1], expected, rtol=0, atol=2e-5)
        for row in rows.advance().tolist():
            tables[row].append(next(blocks))
            rows.set_block(row, tables[row][-1])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("int8", [False, True])
def test_bfloat16_is_read_in_place(int8, shape):
    """Against the same numbers in float32: only the rounding of the answer differs."""
    block, dim = shape
    generator = torch.Generator().manual_seed(5)
    values = torch.randn(2, 6, 2, block, dim, generator=generator).bfloat16()
    q = torch.randn(3, 4, dim, generator=generator).bfloat16()
    k, v = torch.randn(2, 3, 2, dim, generator=generator).bfloat16()
    lengths, tables = (2 * block + 1, 2 * block, 2), [[4, 1, 3], [5, 2], [0]]
    rows = DecodeRows([sequence_of(length) for length in lengths], tables, block)
    got = []
    for dtype in (torch.bfloat16, torch.float32):
        kernels = NumbaAttention(block, dtype)
        layer = layer_of(values.to(dtype), int8)
        kernels.prepare(StepBatch(rows, []), torch.from_numpy(rows.slots))
        kernels.store(layer, k.to(dtype), v.to(dtype))
        got.append(
            kernels.attend(layer, q.to(dtype), k.to(dtype), v.to(dtype), AttentionOptions(0.3))
        )
    assert got[0].dtype is torch.bfloat16
    torch.testing.assert_close(got[0], got[1].bfloat16(), rtol=0, atol=0)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("shape", SHAPES)
def test_unwritten_memory_is_not_read(shape, window, softcap):
    """Memory after each row's last token, and before its window, is NaN."""
    block, dim = shape
    options = AttentionOptions(0.3, window, softcap)
    lengths, tables = (2 * block + 3, 2 * block, 2), [[4, 1, 3], [5, 2], [0]]
    rows = DecodeRows([sequence_of(length) for length in lengths], tables, block)
    layer = KVLayer(torch.full((2, 6, 2, block, dim), torch.nan))
    contexts = [torch.randn(2, length, 2, dim) for length in lengths]
    for length, table, context in zip(lengths, tables, contexts, strict=True):
        for token in range(max(0, length - (window or length)), length):
            layer.data[:, table[token // block], :, token % block] = context[:, token]
    q = torch.randn(3, 6, dim)
    k, v = torch.stack([context[:, -1] for context in contexts], dim=1)
    kernels = NumbaAttention(block, torch.float32)
    kernels.prepare(StepBatch(rows, []), torch.from_numpy(rows.slots))
    kernels.store(layer, k, v)
    got = kernels.attend(layer, q, k, v, options)
    for row, context in enumerate(contexts):
        keys, values = context
        expected = dense(q[row : row + 1], keys, values, lengths[row] - 1, options)
        torch.testing.assert_close(got[row : row + 1], expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("none", [torch.nan, torch.inf])
def test_nan_row_does_not_affect_others(none, softcap):
    rows = DecodeRows([sequence_of(9), sequence_of(8), sequence_of(2)], [[4, 1, 3], [5, 2], [0]], 4)
    layer = layer_of(torch.randn(2, 6, 2, BLOCK, DIM), int8=False)
    q, kv = torch.randn(3, 4, DIM), torch.randn(2, 3, 2, DIM)
    kernels = NumbaAttention(BLOCK, torch.float32)
    kernels.prepare(StepBatch(rows, []), torch.from_numpy(rows.slots))
    kernels.store(layer, kv[0], kv[1])
    options = AttentionOptions(0.3, softcap=softcap)
    right = kernels.attend(layer, q, kv[0], kv[1], options)
    q[1] = none
    got = kernels.attend(layer, q, kv[0], kv[1], options)
    assert torch.equal(got[[0, 2]], right[[0, 2]])


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 16])
def test_int8_attention_is_near_the_exact_result(window, softcap):
    options = AttentionOptions(DIM**-0.5, window, softcap)
    answer = attend(Case([(30, 1), (0, 9), (25, 1), (12, 7)], (4, 2), options), 0, int8=True)
    moved = (answer.got - answer.given).norm() / answer.given.norm()
    assert 1e-4 < moved < 0.01
