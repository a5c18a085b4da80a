"""Checks the Triton attention kernels against float64.

Inputs are drawn from a seed. Every slot of the cache that a kernel must not read holds NaN, and so
does the memory in which outputs are allocated. Tests call these functions on the CPU under
TRITON_INTERPRET=1; `python -m benchmarks.gpu` calls them on a device.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from services.worker.kernels.cuda.attention import TritonAttention
from services.worker.kernels.cuda.recordable import RecordableDecodes
from services.worker.kernels.interface import AttentionOptions
from services.worker.kv.cache import KVLayer
from services.worker.requests.types.batch import DecodeRows, PrefillChunk, StepBatch
from services.worker.requests.types.prompt import Prompt
from services.worker.requests.types.sequence import Sequence

# Maximum ‖error‖ / ‖reference‖ by type.
BOUNDS = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
SPARE_BLOCKS = 3


@dataclass(frozen=True)
class Case:
    """A step over sequences of (tokens before it, tokens in it); one token is a decode."""

    name: str
    shapes: tuple[tuple[int, int], ...]
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype = torch.float32
    window: int | None = None
    softcap: float | None = None
    int8: bool = False
    block_tokens: int = 16
    strided: bool = False  # q, k and v are slices of one projection's output

    @property
    def options(self) -> AttentionOptions:
        return AttentionOptions(self.head_dim**-0.5, self.window, self.softcap)


@dataclass(frozen=True)
class Layout:
    """Placement of a case's sequences: decodes in falling order of context, then chunks."""

    batch: StepBatch
    contexts: list[Tensor]  # slots of each sequence, its new ones last
    new: Tensor  # slots of the step's tokens
    blocks: int

    @property
    def old(self) -> Tensor:
        """Slots that hold a context before the step."""
        slots = torch.cat(self.contexts)
        return slots[~torch.isin(slots, self.new)]


def layout_of(case: Case, random: torch.Generator) -> Layout:
    """Scatters the sequences over random blocks, with SPARE_BLOCKS unused."""
    order = [*sorted((s for s in case.shapes if s[1] == 1), reverse=True),
             *(s for s in case.shapes if s[1] > 1)]  # fmt: skip
    counts = [-(-(start + tokens) // case.block_tokens) for start, tokens in order]
    blocks = sum(counts) + SPARE_BLOCKS
    tables = cut(torch.randperm(blocks, generator=random), counts)
    sequences = [_sequence(start, start + tokens) for start, tokens in order]
    decodes = sum(tokens == 1 for _, tokens in order)
    rows = DecodeRows(
        sequences[:decodes], [table.tolist() for table in tables[:decodes]], case.block_tokens
    )
    chunks = [
        PrefillChunk(sequence, start, start + tokens, table.numpy())
        for sequence, (start, tokens), table in list(zip(sequences, order, tables, strict=True))[
            decodes:
        ]
    ]
    offsets = torch.arange(case.block_tokens)
    contexts = [
        (table[:, None] * case.block_tokens + offsets).view(-1)[: start + tokens]
        for table, (start, tokens) in zip(tables, order, strict=True)
    ]
    new = [slots[start:] for slots, (start, _) in zip(contexts, order, strict=True)]
    return Layout(StepBatch(rows, chunks), contexts, torch.cat(new), blocks)


def cut(x: Tensor, sizes: list[int]) -> list[Tensor]:
    """Splits x along its first dimension into pieces of these sizes; drops the rest."""
    return list(torch.split(x[: sum(sizes)], sizes))


def _sequence(computed: int, length: int) -> Sequence:
    sequence = Sequence.start(Prompt("r", (1,) * length, length, 9), 9)
    sequence.computed = computed
    return sequence


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fills memory that is allocated without a value with NaN, or with the largest integer."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    filling: Any = torch.utils.deterministic
    fill = filling.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    filling.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic)
        filling.fill_uninitialized_memory = fill


def flat(data: Tensor) -> Tensor:
    """[2, blocks, kv_heads, block_tokens, …] → [2, slots, kv_heads, …]."""
    return data.transpose(2, 3).flatten(1, 2)


def set_slots(data: Tensor, slots: Tensor, values: Tensor) -> None:
    """Writes values [2, len(slots), kv_heads, …] into [2, blocks, kv_heads, block_tokens, …]."""
    size = data.shape[3]
    data[:, slots // size, :, slots % size] = values.transpose(0, 1)


def poisoned_layer(case: Case, layout: Layout, random: torch.Generator) -> KVLayer:
    """Returns a layer with random values in the slots of earlier tokens and poison in others."""
    size = (2, layout.blocks, case.kv_heads, case.block_tokens)
    filled = (2, len(layout.old), case.kv_heads)
    if not case.int8:
        data = torch.full((*size, case.head_dim), torch.nan, dtype=case.dtype)
        values = torch.randn(*filled, case.head_dim, generator=random)
        set_slots(data, layout.old, values.to(case.dtype))
        return KVLayer(data)
    data = torch.full((*size, case.head_dim), -128, dtype=torch.int8)
    scales = torch.full(size, torch.nan)
    steps = torch.randint(-127, 128, (*filled, case.head_dim), generator=random)
    set_slots(data, layout.old, steps.to(torch.int8))
    set_slots(scales, layout.old, torch.rand(filled, generator=random) * 0.03)
    return KVLayer(data, scales)


def step_inputs(case: Case, tokens: int, random: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    heads = case.heads + 2 * case.kv_heads
    packed = torch.randn(tokens, heads, case.head_dim, generator=random).to(case.dtype)
    q, k = packed[:, : case.heads], packed[:, case.heads : -case.kv_heads]
    v = packed[:, -case.kv_heads :]
    if case.strided:
        return q, k, v
    return q.contiguous(), k.contiguous(), v.contiguous()


def to_device(layer: KVLayer, device: torch.device) -> KVLayer:
    scales = layer.scales.to(device) if layer.scales is not None else None
    return KVLayer(layer.data.to(device), scales)


@dataclass(frozen=True)
class Outcome:
    """A step's layer before and after, its inputs and its output, on the CPU."""

    case: Case
    layout: Layout
    before: KVLayer
    after: KVLayer
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor


def run_step(case: Case, seed: int, device: torch.device, processors: int | None = None) -> Outcome:
    """Stores and attends once."""
    random = torch.Generator().manual_seed(seed)
    layout = layout_of(case, random)
    before = poisoned_layer(case, layout, random)
    q, k, v = step_inputs(case, len(layout.new), random)
    layer = KVLayer(
        before.data.clone(), before.scales.clone() if before.scales is not None else None
    )
    layer = to_device(layer, device)
    kernels = TritonAttention(case.block_tokens, device, case.dtype, processors)
    with poisoned_memory():
        kernels.prepare(layout.batch, layout.new.to(device))
        qd, kd, vd = _send(q, k, v, device, case.strided)
        kernels.store(layer, kd, vd)
        out = kernels.attend(layer, qd, kd, vd, case.options)
    after = to_device(layer, torch.device("cpu"))
    return Outcome(case, layout, before, after, q, k, v, out.cpu())


def run_fixed(
    case: Case, seed: int, device: torch.device, padding: int, processors: int | None = None
) -> Outcome:
    """Stores and attends once as a recorded step of decodes does, with `padding` rows after those
    of the case. Padding rows write into an additional block, which the outcome omits."""
    random = torch.Generator().manual_seed(seed)
    layout = layout_of(case, random)
    before = poisoned_layer(case, layout, random)
    rows, size = len(layout.new), len(layout.new) + padding
    q, k, v = step_inputs(case, size, random)
    data = torch.nn.functional.pad(before.data, (0, 0, 0, 0, 0, 0, 0, 1))
    scales = before.scales
    if scales is not None:
        scales = torch.nn.functional.pad(scales, (0, 0, 0, 0, 0, 1))
    layer = to_device(KVLayer(data, scales), device)
    width = layout.batch.decodes.tables.shape[1]
    kernels = RecordableDecodes(case.block_tokens, device, size + 2, width, processors)
    slots = torch.full((size,), layout.blocks * case.block_tokens)
    slots[:rows] = layout.new
    positions = torch.zeros(size, dtype=torch.long)
    positions[:rows] = torch.from_numpy(layout.batch.decodes.positions)
    with poisoned_memory():
        kernels.prepare(layout.batch, slots.to(device))
        kernels.begin(positions.to(device))
        qd, kd, vd = _send(q, k, v, device, case.strided)
        kernels.store(layer, kd, vd)
        out = kernels.attend(layer, qd, kd, vd, case.options).cpu()
    there = to_device(layer, torch.device("cpu"))
    after = KVLayer(there.data[:, :-1], None if there.scales is None else there.scales[:, :-1])
    if not out[rows:].isfinite().all():
        out[:rows] = torch.nan  # fails the check: padding rows must stay finite
    return Outcome(case, layout, before, after, q[:rows], k[:rows], v[:rows], out[:rows])


def _send(
    q: Tensor, k: Tensor, v: Tensor, device: torch.device, strided: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Copies the inputs; strided ones stay slices of one tensor."""
    if not strided:
        return q.to(device), k.to(device), v.to(device)
    packed, heads, kv_heads = torch.cat([q, k, v], 1).to(device), q.shape[1], k.shape[1]
    return packed[:, :heads], packed[:, heads:-kv_heads], packed[:, -kv_heads:]


def attention_error(outcome: Outcome) -> float:
    """Returns ‖out − ref‖ / ‖ref‖ against dense attention in float64 over the stored values."""
    values = flat(outcome.after.data).double()
    if outcome.after.scales is not None:
        values = values * flat(outcome.after.scales).double().unsqueeze(-1)
    parts, row = [], 0
    for slots, tokens in zip(outcome.layout.contexts, _tokens(outcome.layout), strict=True):
        q = outcome.q[row : row + tokens].double()
        parts.append(dense(q, values[0, slots], values[1, slots], outcome.case.options))
        row += tokens
    return relative(outcome.out.double(), torch.cat(parts))


def _tokens(layout: Layout) -> list[int]:
    return [1] * len(layout.batch.decodes) + [chunk.tokens for chunk in layout.batch.chunks]


def relative(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


def dense(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
    """Attention of q [n, heads, dim], the last n positions of k and v [length, kv_heads, dim]."""
    group, length = q.shape[1] // k.shape[1], len(k)
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * options.scale
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    distance = torch.arange(length - len(q), length)[:, None] - torch.arange(length)
    hidden = distance < 0
    if options.window is not None:
        hidden |= distance >= options.window
    scores = scores.masked_fill(hidden, -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


def store_faults(outcome: Outcome) -> list[str]:
    """Returns the faults of storing, as sentences."""
    case, new = outcome.case, outcome.layout.new
    faults = []
    given = torch.stack([outcome.k, outcome.v])
    stored = flat(outcome.after.data)[:, new]
    if outcome.after.scales is None:
        if not torch.equal(stored, given):
            faults.append("a stored token differs from what was given")
    else:
        scales = flat(outcome.after.scales)[:, new]
        wanted = given.float().abs().amax(-1) / 127
        if not torch.allclose(scales, wanted, rtol=1e-6, atol=0):
            faults.append("a scale is not max|x| / 127")
        error = (stored.float() * scales.unsqueeze(-1) - given.float()).abs()
        if not bool((error <= scales.unsqueeze(-1) * 0.50001).all()):
            faults.append("a value is off by more than half a step")
    elsewhere = torch.ones(outcome.layout.blocks * case.block_tokens, dtype=torch.bool)
    elsewhere[new] = False
    for before, after in [(outcome.before.data, outcome.after.data),
                          (outcome.before.scales, outcome.after.scales)]:  # fmt: skip
        if before is None or after is None:
            continue
        if not same_bits(flat(before)[:, elsewhere], flat(after)[:, elsewhere]):
            faults.append("a slot of another token was written")
    return faults


def same_bits(x: Tensor, y: Tensor) -> bool:
    """Compares bits, so that NaN equals NaN."""
    return torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))


MIXED = ((40, 1), (17, 1), (0, 1), (129, 1), (0, 21), (50, 9), (3, 40))

CASES = [
    Case("MHA of 32", ((70, 1), (3, 1), (0, 5)), 4, 4, 32),
    Case("GQA of 64, mixed", MIXED, 6, 2, 64),
    Case("a head of 80, strided", ((33, 1), (20, 7)), 4, 2, 80, strided=True),
    Case("a head of 96", ((33, 1), (20, 7)), 2, 2, 96),
    Case("GQA of 128", ((90, 1), (31, 1), (10, 20)), 4, 1, 128),
    Case("a head of 256", ((40, 1), (9, 6)), 2, 1, 256),
    Case("many heads of one key head", ((20, 1), (7, 3)), 71, 1, 32),
    Case("one long sequence", ((2500, 1),), 4, 2, 32),
    Case("a long one among short ones", ((1300, 1), (20, 1), (0, 1), (600, 1), (400, 5)), 2, 1, 64),
    Case("a window", ((100, 1), (5, 1), (260, 1), (90, 30), (0, 12)), 4, 2, 64, window=33),
    Case("a window over splits", ((1900, 1), (700, 1)), 2, 1, 32, window=1100),
    Case("a window of two blocks", ((64, 1), (30, 6)), 2, 2, 32, window=16, block_tokens=8),
    Case("a window of one token", ((40, 1), (30, 6)), 2, 2, 32, window=1),
    Case("a soft-cap", ((60, 1), (20, 9)), 4, 2, 64, softcap=3.0),
    Case("a wide soft-cap and a window", ((60, 1), (20, 9)), 4, 2, 64, window=25, softcap=50.0),
    Case("blocks of 4", ((30, 1), (6, 5)), 2, 1, 32, block_tokens=4),
    Case("blocks of 12", ((30, 1), (6, 5)), 2, 1, 32, block_tokens=12),
    Case("INT8", ((90, 1), (31, 1), (10, 20)), 4, 2, 64, int8=True),
    Case("INT8, MHA, long", ((1500, 1), (10, 1)), 2, 2, 128, int8=True),
    Case("INT8, a window and a soft-cap", ((200, 1), (30, 9)), 4, 1, 80, int8=True, window=40,
         softcap=5.0),
]  # fmt: skip


DECODES = [
    replace(case, name=f"recorded, {case.name}", shapes=tuple(s for s in case.shapes if s[1] == 1))
    for case in CASES
]


def in_types(case: Case) -> list[Case]:
    """Returns the case in each dtype."""
    return [
        replace(case, name=f"{case.name}, {str(dtype).removeprefix('torch.')}", dtype=dtype)
        for dtype in BOUNDS
    ]
