"""Tools to compare a forward with transformers': attention that records its calls, probe inputs,
and the difference of logits."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from services.runtime.refusals.config import OTHER_FAMILY
from services.worker.kernels.interface import AttentionOptions
from services.worker.kernels.reference.paging import quantize
from services.worker.kv.cache import KVShape

PROBE_TOKENS = 8  # two such sequences take a model of 0.6 B parameters a second on one core
# Multiplications allowed to probe beyond a window: 0.25 s on two slow cores.
MAX_PROBE_WORK = 2e10


class UnsupportedAttention(ValueError):
    """A predicate about a model with attention that the paged kernels do not compute."""


@dataclass(frozen=True)
class Probe:
    """Plain causal attention that records what each layer stores and how it attends.

    The packed row holds `sequences` of equal length. With `int8`, keys and values take a round
    trip through INT8.
    """

    sequences: int = 1
    int8: bool = False
    shapes: dict[int, KVShape] = field(default_factory=dict)
    heads: dict[int, int] = field(default_factory=dict)
    options: dict[int, AttentionOptions] = field(default_factory=dict)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions
    ) -> Tensor:
        if k.shape != v.shape:
            raise UnsupportedAttention(
                f"has keys of {k.shape[1]} × {k.shape[2]} and values of {v.shape[1]} × "
                f"{v.shape[2]} numbers a token, which the paged KV cache does not hold: "
                + OTHER_FAMILY
            )
        if layer in self.shapes:
            raise UnsupportedAttention(
                "attends more than once in a layer, which the paged KV cache does not support: "
                + OTHER_FAMILY
            )
        self.shapes[layer] = KVShape(k.shape[1], k.shape[2])
        self.heads[layer] = q.shape[1]
        self.options[layer] = options
        if self.int8:
            k, v = _through_int8(k), _through_int8(v)
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        q, k, v = (x.reshape(self.sequences, -1, *x.shape[1:]) for x in (q, k, v))
        scores = torch.einsum("sqhd,skhd->shqk", q, k) * options.scale
        if options.softcap is not None:
            scores = torch.tanh(scores / options.softcap) * options.softcap
        seen = torch.ones_like(scores, dtype=torch.bool).tril()
        if options.window is not None:
            seen = seen.triu(1 - options.window)
        scores = scores.masked_fill(~seen, -torch.inf)
        attended = torch.einsum("shqk,skhd->sqhd", scores.softmax(-1), v)
        return attended.contiguous().flatten(0, 1)


def _through_int8(x: Tensor) -> Tensor:
    codes, scales = quantize(x)
    return (codes * scales.unsqueeze(-1)).to(x.dtype)


def probe_tokens(
    parameters: int, numbers: int, windows: Iterable[int | None], max_context_tokens: int
) -> int:
    """Returns the length of the two probe sequences: beyond every window if that is cheap enough,
    else short. `numbers` counts the query elements of all layers, for the cost of attention."""
    beyond = PROBE_TOKENS + max((window or 0 for window in windows), default=0)
    work = 2 * beyond * (parameters + 2 * beyond * numbers)
    tokens = beyond if work <= MAX_PROBE_WORK else PROBE_TOKENS
    return min(tokens, max_context_tokens)


def probe_sequences(tokens: int, vocabulary: int, max_context_tokens: int) -> tuple[Tensor, Tensor]:
    """Returns constant random tokens and positions [2, tokens]: the start of a context and its
    end."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary, (2, tokens), generator=generator)
    starts = torch.tensor([[0], [max_context_tokens - tokens]])
    return ids, starts + torch.arange(tokens)


def relative_shift(ours: Tensor, expected: Tensor) -> float:
    """Returns the largest relative difference of a row of logits […, rows, vocabulary]. The mean of
    a row is ignored, as in a softmax."""
    ours, expected = (x.float() - x.float().mean(-1, keepdim=True) for x in (ours, expected))
    return float(((ours - expected).norm(dim=-1) / expected.norm(dim=-1)).max())
