"""Times decode, prefill and store against copy bandwidth and PyTorch's attention."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu.timing import Measurement, rates, times_s
from benchmarks.harness.report import Figure
from services.worker.kernels.cuda.attention import TritonAttention
from services.worker.kernels.interface import AttentionOptions
from services.worker.kv.cache import KVLayer
from services.worker.requests.types.batch import DecodeRows, PrefillChunk, StepBatch
from services.worker.requests.types.prompt import Prompt
from services.worker.requests.types.sequence import Sequence

BLOCK_TOKENS, HEADS, HEAD_DIM = 16, 32, 128
OPTIONS = AttentionOptions(HEAD_DIM**-0.5)
DTYPE = torch.bfloat16
MEMORY_SHARE = 0.7  # maximum share of the free memory per case


@dataclass(frozen=True)
class Decode:
    """One step of `batch` sequences with `context` tokens each."""

    batch: int
    context: int
    kv_heads: int
    int8: bool = False

    @property
    def name(self) -> str:
        kind = "MHA" if self.kv_heads == HEADS else f"GQA {HEADS}/{self.kv_heads}"
        stored = "INT8" if self.int8 else "bf16"
        return f"decode {self.batch} x {self.context}, {kind}, {stored}"

    @property
    def token_bytes(self) -> int:
        per_head = HEAD_DIM + 4 if self.int8 else 2 * HEAD_DIM
        return 2 * self.kv_heads * per_head

    @property
    def kv_bytes(self) -> int:
        return self.batch * self.context * self.token_bytes


def decodes(quick: bool) -> list[Decode]:
    shapes = [(128, 8192), (32, 32768), (8, 131072), (1, 1048576)]
    if quick:
        shapes = [(8, 2048), (1, 16384)]
    return [Decode(b, c, kv_heads) for kv_heads in (8, HEADS) for b, c in shapes]


def fits(size_bytes: int) -> bool:
    torch.cuda.empty_cache()
    return size_bytes < MEMORY_SHARE * torch.cuda.mem_get_info()[0]


def make_layer(blocks: int, kv_heads: int, int8: bool = False) -> KVLayer:
    """Returns a layer of small random numbers; the scales of an INT8 layer are equal."""
    size = (2, blocks, kv_heads, BLOCK_TOKENS)
    if int8:
        data = torch.empty(*size, HEAD_DIM, dtype=torch.int8, device="cuda")
        data.random_(-127, 128)
        return KVLayer(data, torch.full(size, 0.01, device="cuda"))
    return KVLayer(torch.empty(*size, HEAD_DIM, dtype=DTYPE, device="cuda").normal_())


def scattered(blocks: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    return np.random.default_rng(0).permutation(blocks)


def sequence_at(position: int) -> Sequence:
    """Returns a sequence without earlier tokens: attention reads only the cache."""
    sequence = Sequence.start(Prompt("r", (1,), 1, 9), 9)
    sequence.computed = position
    return sequence


def rows_of(batch: int, context: int) -> tuple[DecodeRows, int]:
    """Returns rows over scattered blocks, and the number of blocks."""
    width = -(-context // BLOCK_TOKENS)
    tables = scattered(batch * width).reshape(batch, width).tolist()
    sequences = [sequence_at(context - 1) for _ in range(batch)]
    return DecodeRows(sequences, tables, BLOCK_TOKENS), batch * width


def kernels() -> TritonAttention:
    return TritonAttention(BLOCK_TOKENS, torch.device("cuda"), DTYPE)


def decode_times(case: Decode, repeats: int) -> Figure:
    rows, blocks = rows_of(case.batch, case.context)
    layer = make_layer(blocks, case.kv_heads, case.int8)
    attention = kernels()
    attention.prepare(StepBatch(rows, []), torch.from_numpy(rows.slots).cuda())
    q = torch.randn(case.batch, HEADS, HEAD_DIM, dtype=DTYPE, device="cuda")
    kv = q[:, : case.kv_heads]
    return times_s(lambda: attention.attend(layer, q, kv, kv, OPTIONS), repeats, inner=5)


def decode_lines(quick: bool, repeats: int, ceiling: float) -> Iterator[Measurement]:
    """Target: reads at 85 % of the copy bandwidth."""
    for case in decodes(quick):
        if not fits(case.kv_bytes):
            continue
        seconds = decode_times(case, repeats)
        share = rates(case.kv_bytes / ceiling, seconds)
        yield Measurement(f"{case.name}, of copy bandwidth", share, target=0.85)


def int8_lines(quick: bool, repeats: int) -> Iterator[Measurement]:
    """Target: INT8 decodes 1.7 times as fast as bf16 at 32k."""
    batch, context = (4, 4096) if quick else (32, 32768)
    for kv_heads in (8, HEADS):
        native = Decode(batch, context, kv_heads)
        if not fits(native.kv_bytes):
            continue
        bf16 = decode_times(native, repeats).median
        int8 = decode_times(Decode(batch, context, kv_heads, int8=True), repeats)
        ratio = rates(bf16, int8)
        yield Measurement(f"{native.name}: speed of INT8 to bf16", ratio, target=1.7)


def prefill_lines(quick: bool, repeats: int) -> Iterator[Measurement]:
    """Target: 0.7 of the faster of PyTorch's default and its FlashAttention."""
    length = 1024 if quick else 8192
    for kv_heads in (8, HEADS):
        ours = prefill_times(length, kv_heads, repeats)
        default, flash = sdpa_times(length, kv_heads, repeats)
        best = min(default.median, flash.median)
        flops = 2 * length * length * HEADS * HEAD_DIM  # q·k and p·v, half of each is masked
        name = f"prefill {length}, {HEADS}/{kv_heads} heads"
        yield Measurement(f"{name}, rate", rates(flops / 1e12, ours), "TFLOP/s")
        yield Measurement(f"{name}, rate of SDPA", rates(flops / 1e12, default), "TFLOP/s")
        yield Measurement(f"{name}, rate of FlashAttention", rates(flops / 1e12, flash), "TFLOP/s")
        yield Measurement(f"{name}, speed to the faster", rates(best, ours), target=0.7)


def prefill_times(length: int, kv_heads: int, repeats: int) -> Figure:
    """Times a whole prompt in one chunk, with its KV in scattered blocks."""
    table = scattered(length // BLOCK_TOKENS)
    layer = make_layer(len(table), kv_heads)
    attention = kernels()
    batch = StepBatch(
        DecodeRows([], [], BLOCK_TOKENS), [PrefillChunk(sequence_at(0), 0, length, table)]
    )
    attention.prepare(batch, torch.arange(length, device="cuda"))
    q = torch.randn(length, HEADS, HEAD_DIM, dtype=DTYPE, device="cuda")
    kv = q[:, :kv_heads]
    return times_s(lambda: attention.attend(layer, q, kv, kv, OPTIONS), repeats)


def sdpa_times(length: int, kv_heads: int, repeats: int) -> tuple[Figure, Figure]:
    """Times PyTorch's default and FlashAttention, with keys and values repeated per head."""
    q, k, v = torch.randn(3, 1, HEADS, length, HEAD_DIM, dtype=DTYPE, device="cuda")

    def attend() -> Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=True)

    default = times_s(attend, repeats)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return default, times_s(attend, repeats)


def store_lines(quick: bool, repeats: int, ceiling: float) -> Iterator[Measurement]:
    """Share of the copy bandwidth for bytes read and written; without a target."""
    tokens = 1024 if quick else 65536
    for int8 in (False, True):
        layer = make_layer(tokens // BLOCK_TOKENS, 8, int8)
        slots = torch.from_numpy(scattered(tokens)).cuda()
        k, v = torch.randn(2, tokens, 8, HEAD_DIM, dtype=DTYPE, device="cuda")
        attention = kernels()
        attention.prepare(StepBatch(DecodeRows([], [], BLOCK_TOKENS), []), slots)

        moved = tokens * (Decode(1, 1, 8).token_bytes + Decode(1, 1, 8, int8).token_bytes)
        seconds = times_s(partial(attention.store, layer, k, v), repeats)
        share = rates(moved / ceiling, seconds)
        yield Measurement(
            f"store {tokens} tokens as {'INT8' if int8 else 'bf16'}, of copy bandwidth", share
        )
