"""Drawing a token from each row of numbers, in PyTorch: the likeliest, by a uniform number, and
among what filters leave.

Nothing here reads a value on the host, no shape depends on one, and no row on its neighbours.
Sums that decide are float64; those of a block of weights are float32, so that where a uniform
number falls within some 1e-7 of a token's edge, either side is right.
"""

import torch
from torch import Tensor

from services.worker.kernels.interface import Filters

BLOCK = 128  # columns: enough that few blocks are left, few enough that one is read in no time
ID_BITS = 29  # of a float64's own, what a float32 leaves zero: more than any vocabulary needs
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_FIRST = 0xBF58476D1CE4E5B9 - 2**64
_SECOND = 0x94D049BB133111EB - 2**64


def stream_keys(seeds: Tensor) -> Tensor:
    """What `uniforms` takes of seeds [rows], int64 of any sign."""
    return _mix(seeds)


def uniforms(keys: Tensor, positions: Tensor) -> Tensor:
    """A number in [0, 1) for each (seed, position), float64: SplitMix64 (Steele et al. 2014)
    keyed twice. Its state is a counter: no draw depends on which came before."""
    return _shifted(_mix(keys + positions * _GOLDEN), 11).double() * 2.0**-53


def _mix(z: Tensor) -> Tensor:
    """Of unsigned numbers, kept in int64: products and sums wrap alike."""
    z = z + _GOLDEN
    z = (z ^ _shifted(z, 30)) * _FIRST
    z = (z ^ _shifted(z, 27)) * _SECOND
    return z ^ _shifted(z, 31)


def _shifted(z: Tensor, bits: int) -> Tensor:
    return z.bitwise_right_shift(bits).bitwise_and(2 ** (64 - bits) - 1)


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """First index where the running sum of float32 weights [rows, n] passes uniform × total: never
    one of weight 0. Reads the weights once, and one block a row again."""
    size = weights.shape[-1]
    if size <= 2 * BLOCK:
        total = weights.sum(-1, keepdim=True, dtype=torch.float64)
        return _passed(weights, uniform[:, None] * total)
    sums = _block_sums(weights).double()
    running = sums.cumsum(-1)
    target = uniform[:, None] * running[:, -1:]
    block = torch.searchsorted(running, target, right=True).clamp_(max=sums.shape[-1] - 1)
    target = target - (running.gather(-1, block) - sums.gather(-1, block))
    # Behind the end of a short block stands the last token, again and again.
    inside = weights.gather(-1, _columns(block).clamp_(max=size - 1))
    return (block[:, 0] * BLOCK + _passed(inside, target)).clamp_(max=size - 1)


class TorchSampling:
    """SamplingKernels on any device."""

    def argmax(self, logits: Tensor) -> Tensor:
        return logits.argmax(-1)

    def sample_filtered(self, probs: Tensor, filters: Filters, uniform: Tensor) -> Tensor:
        """Where all rows set a top_k, only so many of the likeliest are put in order; without one,
        how many are enough is known on the device alone, and all are."""
        size, widest = probs.shape[-1], filters.widest
        if widest is not None and widest <= size // 2:
            ordered, ids = _first_of(probs, widest)
        else:
            ordered, ids = probs.sort(dim=-1, descending=True, stable=True)
        kept = _kept(ordered, filters)
        running = kept.double().cumsum(-1)
        place = _passed(kept, uniform[:, None] * running[:, -1:])
        return ids.gather(-1, place[:, None])[:, 0]


def _kept(probs: Tensor, filters: Filters) -> Tensor:
    """Zero what the filters cut from rows in falling order; the first always stays."""
    places = torch.arange(probs.shape[-1], device=probs.device)
    probs = probs * (places < filters.top_k[:, None])
    running = probs.double().cumsum(-1)
    full = running - probs >= filters.top_p[:, None] * running[:, -1:]
    weak = probs < filters.min_p[:, None] * probs[:, :1]
    return probs * ((places == 0) | ~(full | weak))


def _first_of(probs: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The first `width` of a stable falling sort. `topk` ranks equals by chance, so it ranks one
    integer: the bits of the number, which grow with it from 0 up, and the index from the end in
    those that it doesn't use."""
    last = probs.shape[-1] - 1
    index = torch.arange(last, -1, -1, device=probs.device)
    best = (probs.double().view(torch.int64) | index).topk(width).values
    mask = 2**ID_BITS - 1
    return (best & ~mask).view(torch.float64).float(), last - (best & mask)


def _block_sums(x: Tensor) -> Tensor:
    """x [rows, n] → [rows, blocks]; the last may be a shorter one."""
    whole = x.shape[-1] // BLOCK * BLOCK
    sums = x[:, :whole].view(len(x), whole // BLOCK, BLOCK).sum(-1)
    if whole == x.shape[-1]:
        return sums
    return torch.cat([sums, x[:, whole:].sum(-1, keepdim=True)], -1)


def _columns(block: Tensor) -> Tensor:
    """Of a block a row [rows, 1]: [rows, BLOCK]; of the last, some may lie behind the end."""
    return block * BLOCK + torch.arange(BLOCK, device=block.device)


def _passed(weights: Tensor, target: Tensor) -> Tensor:
    """First index where the running sum of weights [rows, n] passes the target [rows, 1], of one
    whose weight is not 0; the last of those where rounding keeps it below."""
    running = weights.double().cumsum(-1)
    last = (weights.shape[-1] - 1 - (weights.flip(-1) > 0).int().argmax(-1)).clamp(min=0)
    first = torch.searchsorted(running, target.clamp(min=0), right=True)[:, 0]
    return torch.minimum(first, last)
