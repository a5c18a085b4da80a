"""An oracle of sampling: one row at a time, in plain Python and NumPy, with a full sort; and the
sampler's draws for given sequences."""

from collections.abc import Iterable, Sequence
from math import inf

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.worker.engine.sampling.sampler import Sampler
from services.worker.kernels.interface import SamplingKernels
from services.worker.kernels.reference.sampling import TorchSampling
from services.worker.kernels.selection import sampling_for
from services.worker.kv.device_streams import ImmediateStreams
from services.worker.requests.types.batch import TokenLogprobs
from services.worker.requests.types.prompt import Prompt, SamplingParams
from services.worker.requests.types.sequence import Sequence as Row
from tests.worker.worker_fixtures import EOS

CPU = torch.device("cpu")
WAYS: dict[str, SamplingKernels] = {"numba": sampling_for(CPU), "torch": TorchSampling()}
SHUT = -1e30
EDGE = 1e-7  # of the mass; closer to a boundary, either token is correct


def row_of(
    sampling: SamplingParams, tokens: Sequence[int] = (1,), prompt_tokens: int = 1, name: str = "r"
) -> Row:
    """A request with these tokens."""
    most = len(tokens) - prompt_tokens + 1_000
    return Row.start(Prompt(name, tuple(tokens), prompt_tokens, most, sampling), most)


def sample(
    logits: Tensor, rows: list[Row], eos_ids: Iterable[int] = (EOS,), way: str = "numba"
) -> tuple[list[int], dict[int, TokenLogprobs]]:
    """Draws with a new sampler."""
    sampler = Sampler(CPU, logits.shape[-1], eos_ids, WAYS[way], ImmediateStreams())
    return sampler.draw(rows, logits).to_host()


def uniform(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    """A number in [0, 1) for each (seed, position): SplitMix64, keyed twice, in unsigned
    integers."""
    state = _mix(np.array([seed % 2**64 for seed in seeds], np.uint64))
    counter = np.array(positions, np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return (_mix(state + counter) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = z + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def penalized(logits: list[float], row: Row) -> list[float]:
    """Penalized logits, token by token, in float32."""
    s, output = row.prompt.sampling, row.tokens[row.prompt_tokens :]
    changed = [np.float32(x) for x in logits]
    for token in set(row.tokens):
        x, r = changed[token], np.float32(s.repetition_penalty)
        changed[token] = x / r if x > 0 else x * r
    for token in set(output):
        changed[token] = changed[token] - np.float32(s.presence_penalty)
        times = np.float32(output.count(token))
        changed[token] = changed[token] - np.float32(s.frequency_penalty) * times
    return [float(x) for x in changed]


def masked(logits: list[float], row: Row, eos_ids: Iterable[int]) -> list[float]:
    """Masked logits, token by token: bias, allowed tokens, early ends, bad words. Masked tokens
    stay above tokens that are not allowed."""
    s, output = row.prompt.sampling, tuple(row.tokens[row.prompt_tokens :])
    changed = [np.float32(x) for x in logits]
    for token, bias in s.logit_bias:
        changed[token] = changed[token] + np.float32(bias)
    shut = {bad[-1] for bad in s.bad_tokens if len(bad) == 1 or output[1 - len(bad) :] == bad[:-1]}
    if len(output) < s.min_tokens:
        shut |= {*eos_ids, *s.stop_token_ids}
    allowed = set(s.allowed_token_ids or range(len(logits)))
    kept = [SHUT if token in shut else float(x) for token, x in enumerate(changed)]
    return [x if token in allowed else -inf for token, x in enumerate(kept)]


def drawn_of(probs: Tensor, sampling: SamplingParams, u: float) -> int:
    """The drawn token. Without filters, tokens are in index order. Else they are sorted, equal ones
    by index, and cut by top_k, by top_p of the rest, and by min_p. The first token with a running
    sum above u is drawn."""
    p = probs.double().numpy()
    filtered = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
    order = np.argsort(-p, kind="stable") if filtered else np.arange(len(p))
    order = order[: sampling.top_k] if sampling.top_k > 0 else order
    p = p[order]
    before = np.cumsum(p) - p
    kept = p >= np.float32(sampling.min_p) * np.float32(p.max())
    if sampling.top_p < 1:
        kept &= before < sampling.top_p * p.sum()
    kept[0] |= filtered
    running = np.cumsum(p * kept)
    return int(order[np.flatnonzero((running > u * running[-1]) & kept & (p > 0))[0]])


def right(logits: list[float], row: Row, eos_ids: Iterable[int] = (EOS,)) -> set[int]:
    """The tokens that may be drawn next: one, or two if the number falls on a boundary."""
    sampling = row.prompt.sampling
    position = len(row.tokens) - row.prompt_tokens
    changed = masked(logits, row, eos_ids)
    changed = penalized(changed, row) if sampling.penalized else changed
    if sampling.temperature == 0:
        return {int(np.argmax(changed))}
    probs = (torch.tensor([changed]) / sampling.temperature).softmax(-1)[0]
    u = float(uniform([sampling.seed], [position])[0])
    near = (u, max(0.0, u - EDGE), min(1 - 2.0**-53, u + EDGE))
    return {drawn_of(probs, sampling, number) for number in near}
