"""Prompts of the measurements."""

import numpy as np

ORDINARY = range(40, 240)  # token ids of the demo model that are words


def prompts(count: int, tokens: int, seed: int) -> list[list[int]]:
    """So many of so many tokens, no two alike, nor of another seed: who shares common beginnings
    finds none."""
    rng = np.random.default_rng(seed)
    drawn = rng.integers(ORDINARY.start, ORDINARY.stop, (count, tokens))
    made: list[list[int]] = drawn.tolist()
    return made
