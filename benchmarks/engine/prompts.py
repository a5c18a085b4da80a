"""Prompts of the benchmarks."""

import numpy as np

ORDINARY = range(40, 240)  # token ids of the demo model that are words


def prompts(count: int, tokens: int, seed: int) -> list[list[int]]:
    """Different prompts of this length; another seed has no common prompts or prefixes."""
    rng = np.random.default_rng(seed)
    drawn = rng.integers(ORDINARY.start, ORDINARY.stop, (count, tokens))
    made: list[list[int]] = drawn.tolist()
    return made
