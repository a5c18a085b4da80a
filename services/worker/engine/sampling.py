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

from services.worker.requests.batch import Ints, TokenLogprobs
from services.worker.requests.prompt import SamplingParams

FIRST_GUESS = 1_024  # likeliest tokens: more than top_p leaves of nearly every distribution


@dataclass(frozen=True, slots=True)
class Draw:
    """One row to draw: how, and after which tokens (the first `prompt_tokens` are the prompt)."""

    sampling: SamplingParams
    tokens: Sequence[int]
    prompt_tokens: int

    @property
    def position(self) -> int:
        """Index of the token to draw among the output's."""
        return len(self.tokens) - self.prompt_tokens


def is_plain(sampling: SamplingParams) -> bool:
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
    penalized = [row for row, draw in enumerate(draws) if draw.sampling.penalized]
    early = [row for row, draw in enumerate(draws) if draw.position < draw.sampling.min_tokens]
    if not penalized and not early:
        return logits
    logits = logits.clone()
    if penalized:
        _penalize_seen(logits, penalized, draws)
    if early and eos_ids:
        rows = torch.tensor(early, device=logits.device)
        logits[rows[:, None], torch.tensor(eos_ids, device=logits.device)] = -torch.inf
    return logits


def _penalize_seen(logits: Tensor, rows: list[int], draws: Sequence[Draw]) -> None:
    """Change, in place, the logits of the tokens that those rows have seen, and no others.

    Repetition is over prompt and output (Keskar et al. 2019, §4.1), presence and frequency over
    output.
    """
    changed = [draws[row] for row in rows]
    which, tokens, counts = _seen(changed, logits.shape[-1])
    penalties = np.array(
        [
            (s.repetition_penalty, s.presence_penalty, s.frequency_penalty)
            for s in (draw.sampling for draw in changed)
        ]
    )
    table = np.column_stack((penalties[which], counts)).astype(np.float32)
    repetition, presence, frequency, times = torch.from_numpy(table).to(logits.device).unbind(1)
    at, ids = torch.from_numpy(np.stack((np.array(rows)[which], tokens))).to(logits.device)
    seen = logits[at, ids]
    seen = torch.where(seen > 0, seen / repetition, seen * repetition)
    logits[at, ids] = seen - presence * (times > 0) - frequency * times


def _seen(draws: list[Draw], size: int) -> tuple[Ints, Ints, NDArray[np.float64]]:
    """Each draw's distinct tokens: whose, which, how often in the output; O(n log n) for n."""
    lengths = [len(draw.tokens) for draw in draws]
    whose = np.repeat(np.arange(len(draws)), lengths)
    tokens = np.concatenate([np.asarray(draw.tokens, np.int64) for draw in draws])
    output = np.concatenate([np.arange(len(d.tokens)) >= d.prompt_tokens for d in draws])
    keys, places = np.unique(whose * size + tokens, return_inverse=True)
    whose, tokens = np.divmod(keys, size)
    return whose, tokens, np.bincount(places, weights=output).astype(np.float64)


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
        ordered, ids = _ordered(probs[rows], kept)
        rank = _invert(ordered, uniforms[rows])
        tokens[rows] = ids.gather(-1, rank[:, None])[:, 0]
    return tokens


def _ordered(probs: Tensor, samplings: list[SamplingParams]) -> tuple[Tensor, Tensor]:
    """The weights of the tokens that the filters keep, in falling order, and which they are.

    The likeliest are selected, O(vocabulary), where those are enough for all rows. Only a row
    that sets no top_k may need more than were selected: whether one does is a single flag for the
    whole batch, since on a GPU the host waits for it. Then everything is sorted. Both ways rank
    equals by index and sum in the same order, so it makes no difference to what is drawn.
    """
    total = _totals(probs, samplings)
    width = max(s.top_k if s.top_k > 0 else FIRST_GUESS for s in samplings)
    if width <= probs.shape[-1] // 2:
        ordered, ids = _likeliest(probs, width)
        if _enough(ordered, total, samplings):
            return _filter(ordered, total, samplings), ids
    ordered, ids = probs.sort(dim=-1, descending=True, stable=True)
    return _filter(ordered, total, samplings), ids


def _likeliest(probs: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The first `width` of a stable falling sort. `topk` ranks equals by chance, so it ranks the
    pair (bits of the number, which grow with it from 0 up; index from the end) as one integer."""
    last = probs.shape[-1] - 1
    index = torch.arange(last, -1, -1, device=probs.device)
    best = ((probs.view(torch.int32).long() << 32) | index).topk(width).values
    return (best >> 32).int().view(torch.float32), last - (best & 0xFFFFFFFF)


def _enough(ordered: Tensor, total: Tensor, samplings: list[SamplingParams]) -> bool:
    """Whether the filters would cut whatever comes after `ordered`, in every row."""
    rows = [row for row, s in enumerate(samplings) if s.top_k <= 0]
    if not rows:
        return True
    found, open_ended = ordered[rows], [samplings[row] for row in rows]
    mass = found.double().cumsum(-1)[:, -1:]
    full = mass >= _top_p(open_ended, mass) * total[rows]
    weak = found[:, -1:] < _column([s.min_p for s in open_ended], found) * found[:, :1]
    return bool((full | weak).all())


def _totals(probs: Tensor, samplings: list[SamplingParams]) -> Tensor:
    """Each row's sum, which is 1 but for rounding; it isn't added up where no top_p asks for it."""
    if any(s.top_p < 1 and s.top_k <= 0 for s in samplings):
        return probs.sum(-1, keepdim=True, dtype=torch.float64)
    return torch.ones(len(samplings), 1, dtype=torch.float64, device=probs.device)


def _filter(probs: Tensor, total: Tensor, samplings: list[SamplingParams]) -> Tensor:
    """Zero what top_k, top_p and min_p cut from rows in falling order; the first always stays.

    top_p is a share of what top_k left, or of the row's `total`.
    """
    size = probs.shape[-1]
    top_k = _column([s.top_k if s.top_k > 0 else size for s in samplings], probs)
    probs = probs * (torch.arange(size, device=probs.device) < top_k)
    running = probs.double().cumsum(-1)
    limited = torch.tensor([[s.top_k > 0] for s in samplings], device=probs.device)
    whole = torch.where(limited, running[:, -1:], total)
    min_p = _column([s.min_p for s in samplings], probs)
    kept = (running - probs < _top_p(samplings, running) * whole) & (probs >= min_p * probs[:, :1])
    kept[:, 0] = True
    return probs * kept


def _top_p(samplings: list[SamplingParams], like: Tensor) -> Tensor:
    """Above all sums where it is off: these may end a little above 1."""
    return _column([s.top_p if s.top_p < 1 else 2.0 for s in samplings], like)


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


def _logprobs(row: Tensor, token: int, sampling: SamplingParams) -> TokenLogprobs:
    top = row.topk(min(sampling.logprobs or 0, len(row)))
    return TokenLogprobs(float(row[token]), tuple(top.indices.tolist()), tuple(top.values.tolist()))
