"""Attention kernels against dense attention in float64, written out."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from services.worker.kernels.choose import kernels_for
from services.worker.kernels.cpu import attention as numba_attention
from services.worker.kernels.cpu.attention import NumbaAttention
from services.worker.kernels.interface import AttentionKernels, AttentionOptions
from services.worker.kernels.reference import attention as torch_attention
from services.worker.kernels.reference.attention import TorchAttention
from services.worker.kernels.reference.blocks import TorchBlocks
from services.worker.kernels.reference.paging import quantize
from services.worker.kv.cache import KVLayer, KVShape
from services.worker.requests.batch import DecodeRows, PrefillChunk, StepBatch
from services.worker.requests.prompt import Prompt
from services.worker.requests.sequence import Sequence

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


def layer_of(values: Tensor, int8: bool) -> KVLayer:
    """A layer that holds values [2, blocks, kv_heads, BLOCK, DIM]."""
    return KVLayer(*quantize(values)) if int8 else KVLayer(values.clone())


def read(layer: KVLayer) -> Tensor:
    """What a layer holds, as [2, slots, kv_heads, DIM]."""
    values = layer.data if layer.scales is None else layer.data * layer.scales[..., None]
    return values.transpose(2, 3).flatten(1, 2)


@dataclass
class Answer:
    """What the kernels give, what dense attention over the stored values would, and over what
    was given to store."""

    got: Tensor
    stored: Tensor
    given: Tensor


CPU = torch.device("cpu")


def torch_kernels() -> AttentionKernels:
    return TorchAttention(BLOCK, CPU, torch.float32)


def attend(
    case: Case,
    seed: int,
    int8: bool = False,
    make: Callable[[], AttentionKernels] = torch_kernels,
) -> Answer:
    """For random states in scattered blocks."""
    heads, kv_heads = case.heads
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-(start + n) // BLOCK) for start, n in case.shapes]
    scattered = torch.randperm(sum(counts) + 3, generator=generator).tolist()
    tables = [[scattered.pop() for _ in range(count)] for count in counts]
    values = torch.randn(2, sum(counts) + 3, kv_heads, BLOCK, DIM, generator=generator)
    layer = layer_of(values, int8)
    decodes = [i for i, (_, n) in enumerate(case.shapes) if n == 1]
    rows = DecodeRows([sequence_of(case.shapes[i][0] + 1) for i in decodes],
                      [tables[i] for i in decodes], BLOCK)  # fmt: skip
    decodes.sort(key=lambda i: -case.shapes[i][0])  # as the rows are
    chunked = [i for i, (_, n) in enumerate(case.shapes) if n > 1]
    chunks = [
        PrefillChunk(sequence_of(sum(case.shapes[i])), case.shapes[i][0], sum(case.shapes[i]),
              torch.tensor(tables[i]).numpy())
        for i in chunked
    ]  # fmt: skip
    total = sum(n for _, n in case.shapes)
    q = torch.randn(total, heads, DIM, generator=generator)
    k, v = torch.randn(2, total, kv_heads, DIM, generator=generator)

    def slots(i: int) -> list[int]:
        return [block * BLOCK + offset for block in tables[i] for offset in range(BLOCK)]

    spans = [(i, *case.shapes[i]) for i in [*decodes, *chunked]]
    written = torch.tensor([s for i, start, n in spans for s in slots(i)[start : start + n]])
    expected = read(KVLayer(values))
    expected[:, written] = torch.stack([k, v])
    kernels = make()
    kernels.prepare(StepBatch(rows, chunks), written)
    kernels.store(layer, k, v)
    got = kernels.attend(layer, q, k, v, case.options)

    in_blocks = expected.view(2, -1, BLOCK, kv_heads, DIM).transpose(2, 3)
    assert torch.equal(read(layer), read(layer_of(in_blocks, int8))), "stored where it belongs"

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


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize(
    ("padding", "group_tokens"), [(0, 4096), (8, 4096), (1024, 4096), (1024, 20)]
)
@settings(deadline=None, max_examples=40)
@given(case=CASES, seed=st.integers(0, 99))
def test_attention_is_dense_attention(padding, group_tokens, int8, case, seed):
    """However padding and size cut decodes into groups: none, some, all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_attention, "PADDING_TOKENS", padding)
        patch.setattr(torch_attention, "GROUP_BYTES", group_tokens * 512)
        answer = attend(case, seed, int8)
    torch.testing.assert_close(answer.got, answer.stored, rtol=0, atol=2e-5)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("short_tokens", [0, 5, 48])
@pytest.mark.parametrize("thread_work", [0, 2**40])
@settings(deadline=None, max_examples=40)
@given(case=CASES, seed=st.integers(0, 99))
def test_attention_in_place_is_dense_attention(thread_work, short_tokens, int8, case, seed):
    """On one thread and on two, whichever chunks are attended in place."""

    def make() -> AttentionKernels:
        return NumbaAttention(BLOCK, torch.float32)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(numba_attention, "SHORT_TOKENS", short_tokens)
        patch.setattr(numba_attention, "THREAD_WORK", thread_work)
        patch.setattr(torch, "get_num_threads", lambda: 2)
        answer = attend(case, seed, int8, make)
    torch.testing.assert_close(answer.got, answer.stored, rtol=0, atol=2e-5)


def test_attention_in_place_follows_rows_that_move_on():
    """The same batch, a token later each, over the end of a block and of the tables' width."""
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


@pytest.mark.parametrize("int8", [False, True])
def test_bfloat16_is_read_in_place(int8):
    """Against the same numbers in float32: all that is lost is in the answer's own rounding."""
    generator = torch.Generator().manual_seed(5)
    values = torch.randn(2, 6, 2, BLOCK, DIM, generator=generator).bfloat16()
    q = torch.randn(3, 4, DIM, generator=generator).bfloat16()
    k, v = torch.randn(2, 3, 2, DIM, generator=generator).bfloat16()
    rows = DecodeRows(
        [sequence_of(length) for length in (9, 8, 2)], [[4, 1, 3], [5, 2], [0]], BLOCK
    )
    got = []
    for dtype in (torch.bfloat16, torch.float32):
        kernels = NumbaAttention(BLOCK, dtype)
        layer = layer_of(values.to(dtype), int8)
        kernels.prepare(StepBatch(rows, []), torch.from_numpy(rows.slots))
        kernels.store(layer, k.to(dtype), v.to(dtype))
        got.append(
            kernels.attend(layer, q.to(dtype), k.to(dtype), v.to(dtype), AttentionOptions(0.3))
        )
    assert got[0].dtype is torch.bfloat16
    torch.testing.assert_close(got[0], got[1].bfloat16(), rtol=0, atol=0)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 16])
def test_int8_is_near_what_was_given(window, softcap):
    options = AttentionOptions(DIM**-0.5, window, softcap)
    answer = attend(Case([(30, 1), (0, 9), (25, 1), (12, 7)], (4, 2), options), 0, int8=True)
    moved = (answer.got - answer.given).norm() / answer.given.norm()
    assert 1e-4 < moved < 0.01


def choose(
    dtype: torch.dtype = torch.float32, head_dim: int = 32, int8: bool = False
) -> tuple[object, object]:
    cpu = torch.device("cpu")
    return kernels_for(cpu, BLOCK, dtype, [KVShape(2, head_dim)], [4], int8)


def test_a_cpu_gets_numba_and_never_imports_triton():
    code = (
        "import sys, torch; from services.worker.kv.cache import KVShape;"
        "from services.worker.kernels.choose import kernels_for;"
        "kernels_for(torch.device('cpu'), 4, torch.float32, [KVShape(2, 8)], [2]);"
        "sys.exit('services.worker.kernels.cuda.attention' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    attention, blocks = choose()
    assert isinstance(attention, NumbaAttention) and isinstance(blocks, TorchBlocks)
    assert isinstance(choose(torch.float16)[0], TorchAttention)  # which Numba does not have


@pytest.mark.slow
def test_what_was_compiled_is_kept_in_the_users_folder_and_loaded_next_time(tmp_path):
    code = (
        "from services.worker.machine import keep_what_numba_compiles;"
        "keep_what_numba_compiles();"
        "import torch; from services.worker.kv.cache import KVShape;"
        "from services.worker.kernels.choose import kernels_for;"
        "print(kernels_for(torch.device('cpu'), 4, torch.float32, [KVShape(2, 8)])[0].built)"
    )
    given = {name: x for name, x in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    built = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**given, "XDG_CACHE_HOME": str(tmp_path)},
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        for _ in range(2)
    ]
    assert built == ["compiled", "loaded"]
    assert list((tmp_path / "foretoken/numba").glob("*/loops.*.nbi"))


def test_numba_is_refused_what_it_does_not_take():
    with pytest.raises(ValueError, match=r"not on cpu in torch\.float16: set kernels to auto"):
        kernels_for(CPU, BLOCK, torch.float16, [KVShape(2, 32)], chosen="numba")


def test_what_no_kernel_takes_is_refused_with_what_to_change():
    with pytest.raises(
        ValueError, match=r"not in torch\.float64: set the worker's dtype to one of"
    ):
        choose(torch.float64)
    with pytest.raises(ValueError, match="heads of 4 are too small: set kv_dtype to auto"):
        choose(torch.bfloat16, head_dim=4, int8=True)
    for head_dim in (8, 40, 256):
        choose(torch.bfloat16, head_dim, int8=True)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "heads", "what"),
    [
        (torch.float32, 16, 4, "heads of 16: set worker.kernels to torch"),
        (torch.float32, 320, 4, "heads of 320: set worker.kernels to torch"),
        (torch.bfloat16, 64, 3, "3 query heads for 2 key heads: set worker.kernels to torch"),
    ],
)
def test_what_triton_does_not_take_is_refused(dtype, head_dim, heads, what):
    with pytest.raises(ValueError, match=what):
        kernels_for(torch.device("cuda"), 16, dtype, [KVShape(2, head_dim)], [heads])
