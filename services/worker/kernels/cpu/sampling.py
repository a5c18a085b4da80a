"""Sampling on a CPU: argmax, and draws within top_k, top_p and min_p without a full sort, compiled
by Numba.

The tokens of a row are counted in bins by the leading bits of their probabilities, 16 bins per
power of two. The filters end inside one bin, and the drawn token is in one bin; only these bins are
sorted. Two or three passes of O(vocabulary) per row.
"""

from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from services.worker.kernels.cpu.kernel_cache import cached
from services.worker.kernels.interface import Filters

_SHIFT = 19  # of the bits of a float32; exponent and four bits of the fraction remain
_BINS = 2_048  # up to 1.0 and beyond
_ONES = 0x7FFFFFFF
_ID_BITS = 32
_ZERO = np.float32(0.0)
_WORD_BITS = 32  # tokens of one word of a mask


class CpuSampling:
    """SamplingKernels on a CPU. `argmax` uses NumPy, because PyTorch's is scalar and 15 to 30 times
    slower."""

    def argmax(self, logits: Tensor) -> Tensor:
        return torch.from_numpy(logits.float().numpy().argmax(-1))

    def sample_filtered(self, probs: Tensor, filters: Filters, uniform: Tensor) -> Tensor:
        tokens = torch.empty(len(probs), dtype=torch.int64)
        _draw(
            probs.contiguous().numpy(),
            filters.top_k.numpy(),
            filters.top_p.numpy(),
            filters.min_p.numpy(),
            uniform.numpy(),
            tokens.numpy(),
        )
        return tokens

    def mask_tokens(self, logits: Tensor, rows: Tensor, bits: Tensor) -> None:
        _mask(logits.numpy(), rows.numpy(), bits.numpy())

    def warm(self) -> None:
        """Compiles the sampling kernels, or loads them from disk, so that no step waits for it."""
        one = torch.ones(1, dtype=torch.float64)
        self.sample_filtered(one[None].float(), Filters(one.long(), one, one.float(), 1), one - 1)
        self.mask_tokens(torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64), one[None].int())


@njit(inline="always")
def _bin_of(bits: Any) -> Any:
    """The bin of a number by its bits; also defined for NaN."""
    return min(max(bits >> _SHIFT, 0), _BINS - 1)


@cached
@njit(nogil=True, cache=True)
def _fill(probs: Any, bits: Any, counts: Any, masses: Any) -> tuple[int, Any]:
    """Fills counts and sums of the bins; returns the highest bin with tokens, and the largest
    probability."""
    counts[:] = 0
    masses[:] = 0.0
    largest = _ZERO
    for i in range(len(probs)):
        place = _bin_of(bits[i])
        counts[place] += 1
        masses[place] += probs[i]
        largest = max(largest, probs[i])
    top = _BINS - 1
    while counts[top] == 0:
        top -= 1
    return top, largest


@cached
@njit(nogil=True, cache=True)
def _order(bits: Any, place: int, keys: Any) -> int:
    """Writes a bin's tokens in falling order, equal ones by index, to the low bits of `keys`;
    returns their number."""
    count = 0
    for i in range(len(bits)):
        if _bin_of(bits[i]) == place:
            keys[count] = (np.int64(_ONES - bits[i]) << _ID_BITS) | i
            count += 1
    keys[:count].sort()
    return count


@cached
@njit(nogil=True, cache=True)
def _kept(
    probs: Any,
    bits: Any,
    counts: Any,
    masses: Any,
    keys: Any,
    top: int,
    top_k: int,
    limit: float,
    least: Any,
) -> tuple[float, int]:
    """The sum of the kept tokens, and the last bin that has one. The first token is kept, and
    others in falling order, up to `top_k`, until their sum reaches `limit` or one is below
    `least`."""
    taken, total, end = 0, 0.0, top
    least_bin = _bin_of(np.float32(least).view(np.int32))
    for place in range(top, -1, -1):
        if counts[place] == 0:
            continue
        if taken > 0 and (taken >= top_k or total >= limit or place < least_bin):
            break
        fits = taken + counts[place] <= top_k and total + masses[place] < limit
        end = place
        if fits and (place > least_bin or least <= _ZERO):
            taken += counts[place]
            total += masses[place]
            continue
        for j in range(_order(bits, place, keys)):
            x = probs[keys[j] & 0xFFFFFFFF]
            if taken > 0 and (taken >= top_k or total >= limit or x < least):
                return total, end
            taken += 1
            total += x
    return total, end


@cached
@njit(nogil=True, cache=True)
def _pick(
    probs: Any, bits: Any, counts: Any, masses: Any, keys: Any, top: int, end: int, target: float
) -> int:
    """The first token in falling order, up to bin `end`, with a running sum above the target. If
    rounding keeps the sum below, the last token with a probability above 0."""
    total, last = 0.0, 0
    for place in range(top, end - 1, -1):
        if counts[place] == 0:
            continue
        if place > end and total + masses[place] <= target:
            total += masses[place]
            continue
        for j in range(_order(bits, place, keys)):
            token = keys[j] & 0xFFFFFFFF
            if probs[token] > 0:
                last = token
            total += probs[token]
            if total > target:
                return last
        break
    return last


@cached
@njit(nogil=True, cache=True)
def _draw(probs: Any, top_k: Any, top_p: Any, min_p: Any, uniform: Any, tokens: Any) -> None:
    """Draws tokens[r] from each row of probs [rows, vocabulary], float32. The other arguments are
    [rows]: top_k, at least 1; top_p, float64, 2 is off; min_p, float32; uniform, float64."""
    counts, masses = np.empty(_BINS, np.int64), np.empty(_BINS, np.float64)
    keys = np.empty(probs.shape[1], np.int64)
    for row in range(len(probs)):
        p = probs[row]
        bits = p.view(np.int32)
        top, largest = _fill(p, bits, counts, masses)
        least = min_p[row] * largest
        limit = np.inf
        if top_p[row] < 1.0:
            whole, _ = _kept(p, bits, counts, masses, keys, top, top_k[row], np.inf, _ZERO)
            limit = top_p[row] * whole
        kept, end = _kept(p, bits, counts, masses, keys, top, top_k[row], limit, least)
        tokens[row] = _pick(p, bits, counts, masses, keys, top, end, uniform[row] * kept)


@cached
@njit(nogil=True, cache=True)
def _mask(logits: Any, rows: Any, bits: Any) -> None:
    """Sets logits [batch, vocabulary] of tokens without a bit to −inf: bits [rows, words], int32,
    belong to `rows` of the batch."""
    size = logits.shape[1]
    for place in range(len(rows)):
        row = logits[rows[place]]
        for word in range(bits.shape[1]):
            allowed = bits[place, word]
            first = word * _WORD_BITS
            if allowed == -1:
                continue
            for token in range(first, min(first + _WORD_BITS, size)):
                if not (allowed >> (token - first)) & 1:
                    row[token] = -np.inf
