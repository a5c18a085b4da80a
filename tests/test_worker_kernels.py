"""Attention kernels against dense attention in float64, written out."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from services.worker.batch import Chunk, DecodeRows, StepBatch
from services.worker.kernels import torch_attention
from services.worker.kernels.interface import AttentionOptions
from services.worker.kernels.torch_attention import TorchAttention
from services.worker.prompt import Prompt
from services.worker.sequence import Sequence

BLOCK, DIM = 4, 8


@dataclass
class Case:
    """Sequences as (context before the step, tokens in the step); decodes have one."""

    shapes: list[tuple[int, int]]
    heads: tuple[int, int]  # of queries, of keys and values
    options: AttentionOptions


def dense(q: Tensor, k: Tensor, v: Tensor, start: int, options: AttentionOptions) -> Tensor:
    """q [n, heads, dim] at positions start…, over k and v [start + n, kv_heads, dim]."""
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


def attend(case: Case, seed: int) -> tuple[Tensor, Tensor]:
    """What the kernels give, and what they should, for random states in scattered blocks."""
    heads, kv_heads = case.heads
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-(start + n) // BLOCK) for start, n in case.shapes]
    scattered = torch.randperm(sum(counts) + 3, generator=generator).tolist()
    tables = [[scattered.pop() for _ in range(count)] for count in counts]
    layer = torch.randn(2, sum(counts) + 3, BLOCK, kv_heads, DIM, generator=generator)
    decodes = [i for i, (_, n) in enumerate(case.shapes) if n == 1]
    rows = DecodeRows([sequence_of(case.shapes[i][0] + 1) for i in decodes],
                      [tables[i] for i in decodes], BLOCK)  # fmt: skip
    decodes.sort(key=lambda i: -case.shapes[i][0])  # as the rows are
    chunked = [i for i, (_, n) in enumerate(case.shapes) if n > 1]
    chunks = [
        Chunk(sequence_of(sum(case.shapes[i])), case.shapes[i][0], sum(case.shapes[i]),
              torch.tensor(tables[i]).numpy())
        for i in chunked
    ]  # fmt: skip
    total = sum(n for _, n in case.shapes)
    q = torch.randn(total, heads, DIM, generator=generator)
    k, v = torch.randn(2, total, kv_heads, DIM, generator=generator)

    def slots(i: int) -> list[int]:
        return [block * BLOCK + offset for block in tables[i] for offset in range(BLOCK)]

    order = [*decodes, *chunked]
    spans = [(i, *case.shapes[i]) for i in order]
    written = torch.tensor([s for i, start, n in spans for s in slots(i)[start : start + n]])
    kernels = TorchAttention(BLOCK, torch.device("cpu"), torch.float32)
    kernels.prepare(StepBatch(rows, chunks), written)
    kernels.store(layer, k, v)
    got = kernels.attend(layer, q, k, v, case.options)

    keys, values = layer.flatten(1, 2)
    assert torch.equal(keys[written], k) and torch.equal(values[written], v)
    expected, row = [], 0
    for i, start, n in spans:
        context = slots(i)[: start + n]
        part = dense(q[row : row + n], keys[context], values[context], start, case.options)
        expected.append(part)
        row += n
    return got, torch.cat(expected)


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


@pytest.mark.parametrize("padding", [0, 8, 1024])
@settings(deadline=None, max_examples=40)
@given(case=CASES, seed=st.integers(0, 99))
def test_attention_is_dense_attention(padding, case, seed):
    """Whatever padding cuts decodes into groups: none, some, all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_attention, "PADDING_TOKENS", padding)
        got, expected = attend(case, seed)
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-5)
