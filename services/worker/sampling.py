"""Drawing tokens: a pure function of (seed, position, logits), whatever else is in the batch.

The uniform number of a draw comes from a counter-based generator, so a sequence that was evicted,
moved or resumed draws what it would have drawn. Filters follow the field: penalties, then
temperature, top_k, top_p among what top_k left, min_p relative to the likeliest.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.worker.batch import TokenLogprobs
from services.worker.prompt import Sampling


@dataclass(frozen=True, slots=True)
class Draw:
    """One row to draw: how, and after which tokens (the first `prompt_tokens` are the prompt)."""

    sampling: Sampling
    tokens: Sequence[int]
    prompt_tokens: int

    @property
    def position(self) -> int:
        """Index of the token to draw among the output's."""
        return len(self.tokens) - self.prompt_tokens


def is_plain(sampling: Sampling) -> bool:
    """Whether a row is nothing but an argmax, from its first token to its last."""
    return (
        sampling.temperature == 0
        and not sampling.penalized
        and sampling.logprobs is None
        and not sampling.min_tokens
    )


def sample(
    logits: Tensor, draws: Sequence[Draw], eos_ids: Iterable[int]
) -> tuple[list[int], dict[int, TokenLogprobs]]:
    """One token a row of `logits` [rows, vocabulary], and logprobs of the rows that ask.

    Does not modify `logits`.
    """
    wanted = [row for row, draw in enumerate(draws) if draw.sampling.logprobs is not None]
    raw = logits[wanted].float().log_softmax(-1) if wanted else None
    logits = _penalize(logits.float(), draws, sorted(eos_ids))
    tokens = logits.argmax(-1)
    drawn = [row for row, draw in enumerate(draws) if draw.sampling.temperature > 0]
    if drawn:
        tokens[drawn] = _draw(logits[drawn], [draws[row] for row in drawn])
    chosen: list[int] = tokens.tolist()
    if raw is None:
        return chosen, {}
    rows = zip(wanted, raw, strict=True)
    return chosen, {r: _logprobs(row, chosen[r], draws[r].sampling) for r, row in rows}


def _penalize(logits: Tensor, draws: Sequence[Draw], eos_ids: list[int]) -> Tensor:
    changed = [
        (row, draw)
        for row, draw in enumerate(draws)
        if draw.sampling.penalized or draw.position < draw.sampling.min_tokens
    ]
    if not changed:
        return logits
    logits = logits.clone()
    for row, draw in changed:
        if draw.sampling.penalized:
            logits[row] = _penalized(logits[row], draw)
        if draw.position < draw.sampling.min_tokens:
            logits[row, eos_ids] = -torch.inf
    return logits


def _penalized(logits: Tensor, draw: Draw) -> Tensor:
    """Repetition over prompt and output (Keskar et al. 2019, §4.1); the others over output."""
    sampling, size = draw.sampling, len(logits)
    tokens = torch.tensor(draw.tokens, device=logits.device)
    seen = torch.bincount(tokens, minlength=size) > 0
    counts = torch.bincount(tokens[draw.prompt_tokens :], minlength=size)
    r = sampling.repetition_penalty
    logits = torch.where(seen, torch.where(logits > 0, logits / r, logits * r), logits)
    return logits - sampling.presence_penalty * (counts > 0) - sampling.frequency_penalty * counts


def _draw(logits: Tensor, draws: list[Draw]) -> Tensor:
    """Inverse-CDF draws; a row's way depends on its own parameters alone."""
    samplings = [draw.sampling for draw in draws]
    uniforms = torch.from_numpy(
        uniform([s.seed for s in samplings], [draw.position for draw in draws])
    ).to(logits.device)
    probs = (logits / _column([s.temperature for s in samplings], logits)).softmax(-1)
    tokens = torch.empty(len(draws), dtype=torch.long, device=logits.device)
    filtered = [s.top_p < 1 or s.top_k > 0 or s.min_p > 0 for s in samplings]
    rows = torch.tensor(filtered, device=logits.device)
    if not all(filtered):
        tokens[~rows] = _invert(probs[~rows], uniforms[~rows])
    if any(filtered):
        kept = [s for s, f in zip(samplings, filtered, strict=True) if f]
        ordered, ids = probs[rows].sort(dim=-1, descending=True, stable=True)
        rank = _invert(_filter(ordered, kept), uniforms[rows])
        tokens[rows] = ids.gather(-1, rank[:, None])[:, 0]
    return tokens


def _filter(probs: Tensor, samplings: list[Sampling]) -> Tensor:
    """Zero what top_k, top_p and min_p cut from rows in falling order; the first always stays."""
    size = probs.shape[-1]
    top_k = _column([s.top_k if s.top_k > 0 else size for s in samplings], probs)
    probs = probs * (torch.arange(size, device=probs.device) < top_k)
    before = probs.double().cumsum(-1) - probs
    top_p = _column([s.top_p if s.top_p < 1 else 2.0 for s in samplings], before)
    min_p = _column([s.min_p for s in samplings], probs)
    kept = (before < top_p * probs.sum(-1, keepdim=True)) & (probs >= min_p * probs[:, :1])
    kept[:, 0] = True
    return probs * kept


def _invert(weights: Tensor, uniforms: Tensor) -> Tensor:
    """First index where the running sum passes uniform × total: never one of weight 0."""
    running = weights.double().cumsum(-1)
    targets = uniforms[:, None] * running[:, -1:]
    last = (weights.shape[-1] - 1 - (weights.flip(-1) > 0).int().argmax(-1)).clamp(min=0)
    return torch.minimum(torch.searchsorted(running, targets, right=True)[:, 0], last)


def _column(values: list[int] | list[float] | list[int | float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]


def uniform(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    """A number in [0, 1) for each (seed, position): SplitMix64 (Steele et al. 2014) keyed twice."""
    mask = 2**64 - 1
    state = _mix(np.array([seed & mask for seed in seeds], np.uint64))
    counter = np.array(positions, np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return (_mix(state + counter) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = z + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _logprobs(row: Tensor, token: int, sampling: Sampling) -> TokenLogprobs:
    top = row.topk(min(sampling.logprobs or 0, len(row)))
    return TokenLogprobs(float(row[token]), tuple(top.indices.tolist()), tuple(top.values.tolist()))
