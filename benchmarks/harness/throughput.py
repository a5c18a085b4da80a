"""Prompts of token ids, and the throughput of answering them."""

from collections.abc import Sequence

import numpy as np

Prompts = Sequence[Sequence[int]]
WORD_IDS = range(40, 240)  # token ids of the demo model that are words


def make_prompts(count: int, tokens: int, seed: int) -> list[list[int]]:
    """Returns different prompts of this length. Prompts of different seeds differ from the first
    tokens on, so that prefix caches do not help."""
    rng = np.random.default_rng(seed)
    ids: list[list[int]] = rng.integers(WORD_IDS.start, WORD_IDS.stop, (count, tokens)).tolist()
    return ids


def tokens_per_s(
    system: str, tokens: int, prompts: Prompts, output_tokens: int, elapsed_s: float
) -> float:
    """Raises RuntimeError unless every prompt was answered with `output_tokens`."""
    expected = output_tokens * len(prompts)
    if tokens != expected:
        raise RuntimeError(f"{system} generated {tokens} tokens instead of {expected}")
    return tokens / elapsed_s
