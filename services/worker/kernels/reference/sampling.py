"""Sampling in PyTorch: argmax, draws by a uniform number, and draws within filters.

Nothing here reads a value on the host, no shape depends on one, and no row depends on another. Sums
that decide are float64. Sums of a block of weights are float32: if a uniform number is within about
1e-7 of the boundary between two tokens, either of them is correct.
"""

import torch
from torch import Tensor

from services.worker.kernels.interface import Filters

BLOCK = 128  # columns summed together; the second pass reads the sums and one block per row
ID_BITS = 29  # bits of a float64 that are 0 if it holds a float32; enough for any vocabulary
WORD_BITS = 32  # tokens of one word of a mask
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_FIRST = 0xBF58476D1CE4E5B9 - 2**64
_SECOND = 0x94D049BB133111EB - 2**64


def stream_keys(seeds: Tensor) -> Tensor:
    """The keys of `uniforms` for seeds [rows], int64 of any sign."""
    return _mix(seeds)


def uniforms(keys: Tensor, positions: Tensor) -> Tensor:
    """A number in [0, 1), float64, for each (seed, position): SplitMix64 (Steele et al. 2014),
    keyed twice. Its state is a counter, so that no draw depends on earlier ones."""
    return _shifted(_mix(keys + positions * _GOLDEN), 11).double() * 2.0**-53


def _mix(z: Tensor) -> Tensor:
    """Mixes the bits of unsigned numbers in int64: products and sums wrap in the same way."""
    z = z + _GOLDEN
    z = (z ^ _shifted(z, 30)) * _FIRST
    z = (z ^ _shifted(z, 27)) * _SECOND
    return z ^ _shifted(z, 31)


def _shifted(z: Tensor, bits: int) -> Tensor:
    return z.bitwise_right_shift(bits).bitwise_and(2 ** (64 - bits) - 1)


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """The first index where the running sum of float32 weights [rows, n] exceeds uniform × total;
    never one of weight 0. Reads the weights once, and one block per row again."""
    size = weights.shape[-1]
    if size <= 2 * BLOCK:
        total = weights.sum(-1, keepdim=True, dtype=torch.float64)
        return _first_above(weights, uniform[:, None] * total)
    sums = _block_sums(weights).double()
    running = sums.cumsum(-1)
    target = uniform[:, None] * running[:, -1:]
    block = torch.searchsorted(running, target, right=True).clamp_(max=sums.shape[-1] - 1)
    target = target - (running.gather(-1, block) - sums.gather(-1, block))
    # A short last block is padded by repeating the last token.
    inside = weights.gather(-1, _columns(block).clamp_(max=size - 1))
    return (block[:, 0] * BLOCK + _first_above(inside, target)).clamp_(max=size - 1)


class TorchSampling:
    """SamplingKernels on any device."""

    def argmax(self, logits: Tensor) -> Tensor:
        return logits.argmax(-1)

    def sample_filtered(self, probs: Tensor, filters: Filters, uniform: Tensor) -> Tensor:
        """As the interface. If all rows set a top_k, only the most likely tokens are ordered; else
        all are, because only the device has the number that is enough."""
        size, widest = probs.shape[-1], filters.widest
        if widest is not None and widest <= size // 2:
            ordered, ids = _first_of(probs, widest)
        else:
            ordered, ids = probs.sort(dim=-1, descending=True, stable=True)
        kept = _kept(ordered, filters)
        running = kept.double().cumsum(-1)
        place = _first_above(kept, uniform[:, None] * running[:, -1:])
        return ids.gather(-1, place[:, None])[:, 0]

    def mask_tokens(self, logits: Tensor, rows: Tensor, bits: Tensor) -> None:
        shifts = torch.arange(WORD_BITS, dtype=torch.int32, device=bits.device)
        forbidden = bits.bitwise_not()[:, :, None].bitwise_right_shift(shifts).bitwise_and_(1)
        forbidden = forbidden.flatten(1)[:, : logits.shape[-1]].bool()
        masked = logits.index_select(0, rows).masked_fill_(forbidden, -torch.inf)
        logits.index_copy_(0, rows, masked)


def _kept(probs: Tensor, filters: Filters) -> Tensor:
    """Sets tokens that the filters remove to 0, in rows of falling order; the first always
    stays."""
    places = torch.arange(probs.shape[-1], device=probs.device)
    probs = probs * (places < filters.top_k[:, None])
    running = probs.double().cumsum(-1)
    full = running - probs >= filters.top_p[:, None] * running[:, -1:]
    weak = probs < filters.min_p[:, None] * probs[:, :1]
    return probs * ((places == 0) | ~(full | weak))


def _first_of(probs: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The first `width` of a stable falling sort. `topk` does not order equal numbers by index.
    Therefore it ranks integers: the bits of the number, which grow with a number ≥ 0, and in its
    unused bits the index from the end."""
    last = probs.shape[-1] - 1
    index = torch.arange(last, -1, -1, device=probs.device)
    best = (probs.double().view(torch.int64) | index).topk(width).values
    mask = 2**ID_BITS - 1
    return (best & ~mask).view(torch.float64).float(), last - (best & mask)


def _block_sums(x: Tensor) -> Tensor:
    """Sums of the blocks of x [rows, n]: [rows, blocks]; the last block may be shorter."""
    whole = x.shape[-1] // BLOCK * BLOCK
    sums = x[:, :whole].view(len(x), whole // BLOCK, BLOCK).sum(-1)
    if whole == x.shape[-1]:
        return sums
    return torch.cat([sums, x[:, whole:].sum(-1, keepdim=True)], -1)


def _columns(block: Tensor) -> Tensor:
    """The columns [rows, BLOCK] of one block per row [rows, 1]; some of the last block may be
    beyond the end."""
    return block * BLOCK + torch.arange(BLOCK, device=block.device)


def _first_above(weights: Tensor, target: Tensor) -> Tensor:
    """The first index where the running sum of weights [rows, n] exceeds the target [rows, 1]. If
    rounding keeps the sum below, the last index with a weight above 0."""
    running = weights.double().cumsum(-1)
    last = (weights.shape[-1] - 1 - (weights.flip(-1) > 0).int().argmax(-1)).clamp(min=0)
    first = torch.searchsorted(running, target.clamp(min=0), right=True)[:, 0]
    return torch.minimum(first, last)
