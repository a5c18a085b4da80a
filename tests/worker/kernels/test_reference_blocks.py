"""Block copies to a staging buffer and back, against float64, number by number."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from services.worker.kernels.reference.blocks import TorchBlocks
from services.worker.kv.cache import KVLayer
from services.worker.kv.copies import StagedLayer
from tests.examples import examples

HEADS, TOKENS, DIM = 2, 4, 3
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
POISON = 0x55


def staged(n: int, dtype: torch.dtype, scales: bool = False, ranges: bool = False) -> StagedLayer:
    """A poisoned buffer, strided as a view of larger records."""

    def view(dtype: torch.dtype, *shape: int) -> Tensor:
        size = dtype.itemsize * torch.Size(shape).numel()
        record = torch.full((n, size + 16), POISON, dtype=torch.uint8)
        return record[:, :size].view(dtype).view(n, *shape)

    rows = (2, HEADS, TOKENS)
    return StagedLayer(
        view(torch.int8 if scales or ranges else dtype, *rows, DIM),
        view(torch.float32, *rows) if scales else None,
        view(dtype, 2, HEADS, 2, DIM) if ranges else None,
    )


def through_rest(values: Tensor, filled: list[int]) -> tuple[Tensor, StagedLayer]:
    """Copies values [n, 2, HEADS, TOKENS, DIM] from scattered blocks to records and into other
    blocks; returns the result and the records."""
    n = len(values)
    layer = KVLayer(torch.zeros(2, 2 * n + 1, HEADS, TOKENS, DIM, dtype=values.dtype))
    out, back = torch.arange(n - 1, -1, -1), torch.arange(n, 2 * n)
    layer.data[:, out] = values.transpose(0, 1)
    rest = staged(n, values.dtype, ranges=True)
    TorchBlocks().gather(layer, out, torch.tensor(filled), rest)
    assert torch.equal(layer.data[:, back], torch.zeros_like(layer.data[:, back]))
    TorchBlocks().scatter(layer, back, rest)
    assert not layer.data[:, 2 * n].any(), "another block changed"
    return layer.data[:, back].transpose(0, 1), rest


@dataclass
class Channel:
    """One channel of one block and head: stored numbers, λ and minimum, restored numbers."""

    given: list[float]
    step: float
    low: float
    got: list[float]


def channels(values: Tensor, filled: list[int], got: Tensor, rest: StagedLayer) -> list[Channel]:
    assert rest.ranges is not None
    found = []
    for block, tokens in enumerate(filled):
        for side in range(2):
            for head in range(HEADS):
                for d in range(DIM):
                    step, low = rest.ranges[block, side, head, :, d].tolist()
                    given = values[block, side, head, :tokens, d].tolist()
                    back = got[block, side, head, :tokens, d].tolist()
                    found.append(Channel(given, step, low, back))
    return found


def check(channel: Channel, dtype: torch.dtype) -> None:
    """Checks a channel against ALISE's formula in float64: half a step, plus rounding."""
    low, high = min(channel.given), max(channel.given)
    eps, tiny = torch.finfo(dtype).eps, torch.finfo(dtype).smallest_normal
    assert channel.low == low
    if low == high:
        assert channel.step == 0 and channel.got == channel.given
        return
    exact = (high / 255) - (low / 255)
    assert exact * (1 - 2**-22) <= channel.step <= exact * (1 + 2 * eps) + tiny * eps
    largest = max(abs(low), abs(high))
    rounding = largest * (eps + 2**-21) + tiny * eps
    for given_, got in zip(channel.given, channel.got, strict=True):
        assert abs(got) <= torch.finfo(dtype).max  # neither inf nor NaN
        assert abs(got - given_) <= channel.step / 2 * (1 + 2**-16) + rounding
    halved = tiny * eps if channel.step > 1e35 else 0  # the last bit of a denormal
    assert abs(channel.got[channel.given.index(low)] - low) <= halved


def spread(dtype: torch.dtype) -> st.SearchStrategy[list[float]]:
    """Numbers of a channel: of one size, from denormal to the largest, or of mixed sizes."""
    info = torch.finfo(dtype)
    sizes = [info.smallest_normal * info.eps * 9, info.smallest_normal, 1e-3, 1.0, 300.0, info.max]
    parts = st.floats(-1, 1, width=32)
    of_one_size = st.tuples(st.sampled_from(sizes), st.lists(parts, min_size=1, max_size=7)).map(
        lambda drawn: [drawn[0] * part for part in drawn[1]]
    )
    mixed = st.lists(st.tuples(st.sampled_from(sizes), parts).map(lambda d: d[0] * d[1]),
                     min_size=1, max_size=7)  # fmt: skip
    near = st.tuples(st.sampled_from(sizes[2:]), st.lists(parts, min_size=1, max_size=7)).map(
        lambda drawn: [drawn[0] * (1 - abs(part) * 2**-10) for part in drawn[1]]
    )
    extremes = st.lists(st.sampled_from([info.max, info.min, 0.0, 1.0]), min_size=2, max_size=7)
    return of_one_size | mixed | near | extremes


def tensor_of(pools: list[list[float]], n: int, dtype: torch.dtype) -> Tensor:
    """[n, 2, HEADS, TOKENS, DIM] with the channels filled from the pool in turn."""
    values = torch.zeros(n, 2, HEADS, TOKENS, DIM, dtype=torch.float64)
    flat = values.transpose(3, 4).reshape(-1, TOKENS)
    for row in range(len(flat)):
        pool = pools[row % len(pools)]
        flat[row] = torch.tensor([pool[(row + t) % len(pool)] for t in range(TOKENS)])
    values = flat.view(n, 2, HEADS, DIM, TOKENS).transpose(3, 4)
    return values.to(dtype).contiguous()


@pytest.mark.parametrize("dtype", DTYPES)
@settings(deadline=None, max_examples=examples(150))
@given(data=st.data())
def test_quantized_numbers_are_within_half_a_step(dtype, data):
    pools = data.draw(st.lists(spread(dtype), min_size=1, max_size=9))
    filled = data.draw(st.lists(st.integers(1, TOKENS), min_size=1, max_size=3))
    values = tensor_of(pools, len(filled), dtype)
    got, rest = through_rest(values, filled)
    for channel in channels(values, filled, got, rest):
        check(channel, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(deadline=None, max_examples=examples(60))
@given(
    pools=st.lists(st.lists(st.floats(-9, 9, width=16), min_size=1, max_size=5), min_size=1),
    filled=st.lists(st.integers(1, TOKENS), min_size=1, max_size=3),
    garbage=st.sampled_from([float("nan"), float("inf"), -float("inf"), 60_000, -60_000]),
)
@example(pools=[[0.0]], filled=[1, 4], garbage=float("nan"))
def test_memory_behind_filled_tokens_has_no_effect(dtype, pools, filled, garbage):
    values = tensor_of(pools, len(filled), dtype)
    expected, _ = through_rest(values, filled)
    behind = torch.arange(TOKENS).view(-1, 1) >= torch.tensor(filled).view(-1, 1, 1, 1, 1)
    got, rest = through_rest(values.masked_fill(behind, garbage), filled)
    assert torch.equal(got.masked_fill(behind, 0), expected.masked_fill(behind, 0))
    assert got.isfinite().all()
    assert rest.ranges is not None and rest.ranges.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_and_constant_channels_are_exact(dtype):
    info = torch.finfo(dtype)
    denormal = info.smallest_normal * info.eps * 3
    for constant in (0.0, denormal, -denormal, info.smallest_normal, 0.1, -7.0, info.max, info.min):
        values = torch.full((2, 2, HEADS, TOKENS, DIM), constant, dtype=dtype)
        got, rest = through_rest(values, [TOKENS, 1])
        assert rest.ranges is not None and not rest.ranges[:, :, :, 0].any()
        assert torch.equal(got, values)


@pytest.mark.parametrize("dtype", DTYPES)
def test_256_evenly_spaced_numbers_are_exact(dtype):
    """Computed by hand: λ = 1/8, from −16 up; a number in the middle of two steps rounds to the
    even one."""
    layer = KVLayer(torch.zeros(2, 1, 1, 256, 1, dtype=dtype))
    layer.data[:] = (torch.arange(256) / 8 - 16).view(-1, 1)
    rest = StagedLayer(
        torch.zeros(1, 2, 1, 256, 1, dtype=torch.int8), None, torch.zeros(1, 2, 1, 2, 1).to(dtype)
    )
    block = torch.tensor([0])
    TorchBlocks().gather(layer, block, torch.tensor([256]), rest)
    assert rest.ranges is not None and rest.ranges.flatten().tolist() == [0.125, -16] * 2
    assert rest.data[0, 0].flatten().tolist() == list(range(-128, 128))
    back = KVLayer(torch.zeros_like(layer.data))
    TorchBlocks().scatter(back, block, rest)
    assert torch.equal(back.data, layer.data)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int8])
@settings(deadline=None, max_examples=examples(30))
@given(seed=st.integers(0, 99), n=st.integers(1, 5))
def test_native_and_live_int8_blocks_are_bit_exact(dtype, seed, n):
    """Any bits, including the payload of NaN; other blocks are unchanged."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randint(-128, 128, shape, generator=generator).to(torch.int8)

    def layer() -> KVLayer:
        data = noise(2, 9, HEADS, TOKENS, DIM * dtype.itemsize).view(dtype)
        scales = noise(2, 9, HEADS, TOKENS * 4).view(torch.float32)
        return KVLayer(data, scales if dtype == torch.int8 else None)

    def bits(x: Tensor) -> Tensor:
        return x.contiguous().view(torch.int8)

    source, target, before = layer(), layer(), layer()
    before.data.copy_(target.data)
    here, there = (torch.randperm(9, generator=generator)[:n] for _ in range(2))
    rest = staged(n, dtype, scales=dtype == torch.int8)
    TorchBlocks().gather(source, here, torch.full((n,), TOKENS), rest)
    TorchBlocks().scatter(target, there, rest)
    assert torch.equal(bits(target.data[:, there]), bits(source.data[:, here]))
    if source.scales is not None and target.scales is not None:
        assert torch.equal(bits(target.scales[:, there]), bits(source.scales[:, here]))
    others = torch.tensor([b for b in range(9) if b not in there.tolist()], dtype=torch.long)
    assert torch.equal(bits(target.data[:, others]), bits(before.data[:, others]))
