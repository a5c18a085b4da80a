"""Checks block copies: bit for bit, or within half a step of INT8 at rest."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.gpu.checks import poisoned_memory, same_bits, to_device
from services.worker.kernels.cuda.blocks import TritonBlocks
from services.worker.kv.cache import KVLayer
from services.worker.kv.copies import StagedLayer

BLOCKS, BLOCK_TOKENS = 9, 16
GUARD = 3  # staging blocks on both sides that must stay unwritten
INTEGER_POISON = 99


@dataclass(frozen=True)
class CopyCase:
    """Blocks of values made by `fill`; the first `filled` tokens of each block are valid."""

    name: str
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    fill: Callable[[Tensor], Tensor] = lambda x: x  # of standard normal float64
    filled: tuple[int, ...] = (16, 16, 3, 1)


FILLS: dict[str, Callable[[Tensor], Tensor]] = {
    "random": lambda x: x,
    "constant channels": lambda x: x[:1, :1, :1, :1].expand_as(x) * 37,
    "zeros": lambda x: x * 0,
    "denormals": lambda x: x * 1e-40,
    "near the largest": lambda x: x.sign() * 3.4e38,
    "a narrow range far from zero": lambda x: 1000 + 0.5 * x,
}
TYPES = (torch.float32, torch.float16, torch.bfloat16)


def copy_cases(kv_heads: int, head_dim: int) -> list[CopyCase]:
    """Returns every fill in every dtype."""
    return [
        CopyCase(f"{name}, {str(dtype).removeprefix('torch.')}", kv_heads, head_dim, dtype, fill)
        for name, fill in FILLS.items()
        for dtype in TYPES
    ]


def make_layer(case: CopyCase, random: torch.Generator) -> KVLayer:
    size = (2, BLOCKS, case.kv_heads, BLOCK_TOKENS, case.head_dim)
    values = case.fill(torch.randn(size, generator=random, dtype=torch.float64))
    most = torch.finfo(case.dtype).max
    return KVLayer(values.clamp(-most, most).to(case.dtype))


def staging(n: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns poison [n, *shape], a slice of a wider record between guard blocks."""
    wide = torch.empty((n + 2 * GUARD, 2, *shape), dtype=dtype, device=device)
    return _poisoned(wide)[GUARD : GUARD + n, 1]


def guards_hold(staged: Tensor) -> bool:
    """Returns whether the poison around a `staging` buffer is unchanged."""
    n = len(staged)
    storage = torch.empty(0, dtype=staged.dtype, device=staged.device)
    storage.set_(staged.untyped_storage())
    wide = storage.view(n + 2 * GUARD, 2, *staged.shape[1:])
    around = [wide[:GUARD], wide[GUARD + n :], wide[:, 0]]
    return all(same_bits(part, _poisoned(part)) for part in around)


def round_trip_faults(case: CopyCase, seed: int, device: torch.device, int8: bool) -> list[str]:
    """Gathers blocks and scatters them into other blocks of a poisoned layer, bit for bit."""
    random = torch.Generator().manual_seed(seed)
    layer = _live_int8(case, random) if int8 else make_layer(case, random)
    n = len(case.filled)
    order = torch.randperm(BLOCKS, generator=random)
    source, target = order[:n].to(device), order[n : 2 * n].to(device)
    shape = (2, case.kv_heads, BLOCK_TOKENS)
    staged = StagedLayer(
        staging(n, (*shape, case.head_dim), layer.data.dtype, device),
        staging(n, shape, torch.float32, device) if int8 else None,
    )
    there = to_device(layer, device)
    back = KVLayer(
        _poisoned(there.data), _poisoned(there.scales) if there.scales is not None else None
    )
    blocks = TritonBlocks(device)
    with poisoned_memory():
        blocks.gather(there, source, torch.tensor(case.filled, device=device), staged)
        blocks.scatter(back, target, staged)
    faults = [] if guards_hold(staged.data) else ["gather wrote past the staging buffer"]
    for before, after in [(there.data, back.data), (there.scales, back.scales)]:
        if before is None or after is None:
            continue
        if not same_bits(before[:, source], after[:, target]):
            faults.append("a round trip changed a bit")
        others = [b for b in range(BLOCKS) if b not in target.tolist()]
        if not same_bits(after[:, others], _poisoned(after)[:, others]):
            faults.append("scatter wrote to a block that is not a target")
    return faults


def _live_int8(case: CopyCase, random: torch.Generator) -> KVLayer:
    size = (2, BLOCKS, case.kv_heads, BLOCK_TOKENS)
    data = torch.randint(-127, 128, (*size, case.head_dim), generator=random).to(torch.int8)
    return KVLayer(data, torch.rand(size, generator=random))


def _poisoned(x: Tensor) -> Tensor:
    return torch.full_like(x, torch.nan if x.is_floating_point() else INTEGER_POISON)


def at_rest_faults(case: CopyCase, seed: int, device: torch.device) -> list[str]:
    """Quantizes and dequantizes; bounds the error of every filled value by half a step plus its
    rounding."""
    random = torch.Generator().manual_seed(seed)
    layer, n = make_layer(case, random), len(case.filled)
    source = torch.randperm(BLOCKS, generator=random)[:n]
    behind = torch.arange(BLOCK_TOKENS) >= torch.tensor(case.filled)[:, None]
    for block, hidden in zip(source.tolist(), behind, strict=True):
        layer.data[:, block, :, hidden] = torch.nan  # must not widen a range
    shape = (2, case.kv_heads)
    staged = StagedLayer(
        staging(n, (*shape, BLOCK_TOKENS, case.head_dim), torch.int8, device),
        ranges=staging(n, (*shape, 2, case.head_dim), case.dtype, device),
    )
    there = to_device(layer, device)
    back = KVLayer(_poisoned(there.data))
    copies = TritonBlocks(device)
    with poisoned_memory():
        copies.gather(there, source.to(device), torch.tensor(case.filled, device=device), staged)
        copies.scatter(back, source.to(device), staged)
    given = layer.data[:, source].transpose(0, 1).double()
    got = back.data.cpu()[:, source].transpose(0, 1).double()
    assert staged.ranges is not None
    seen = ~behind[:, None, None, :, None].expand_as(given)
    return _rest_faults(case, given, got, seen, staged, staged.ranges.cpu().double())


def _rest_faults(
    case: CopyCase, given: Tensor, got: Tensor, seen: Tensor, staged: StagedLayer, ranges: Tensor
) -> list[str]:
    faults = []
    if not (guards_hold(staged.data) and staged.ranges is not None and guards_hold(staged.ranges)):
        faults.append("gather wrote past the staging buffer")
    if not bool(got.isfinite().all()):
        faults.append("a finite value came back infinite or as NaN")
    step, low = ranges.unsqueeze(4).unbind(3)
    lowest = given.where(seen, torch.inf).amin(3, keepdim=True)
    spread = given.where(seen, -torch.inf).amax(3, keepdim=True) - lowest
    if not torch.equal(low, lowest):
        faults.append("the minimum of a channel is not kept exactly")
    if not bool(((step == 0) == (spread == 0)).all()):
        faults.append("λ is 0 for a channel that is not constant, or not 0 for one that is")
    info = torch.finfo(case.dtype)
    rounding = given.abs() * info.eps + info.tiny * info.eps
    computing = (given.abs() + lowest.abs() + spread) * 4 * torch.finfo(torch.float32).eps
    bound = step * 0.5001 + rounding + computing.where(spread > 0, 0)
    if not bool(((got - given).abs() <= bound)[seen].all()):
        faults.append("a value is off by more than half a step")
    if not bool((spread <= 255.001 * step + info.tiny * info.eps).all()):
        faults.append("a range reaches beyond 255 steps")
    tight = spread / 255 * (1 + 4 * max(info.eps, 1e-6)) + info.tiny * info.eps
    if not bool((step <= tight).all()):
        faults.append("λ is larger than its range requires")
    return faults
