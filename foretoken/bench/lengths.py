"""Token length distributions: a number, a range, or a lognormal. Pure."""

from collections.abc import Callable
from random import Random

MAX_TOKENS = 10_000_000
SHAPES = "128, 64-512 (uniform), or lognormal:MEDIAN,SIGMA"

Draw = Callable[[Random], int]


def parse_lengths(text: str, option: str) -> Draw:
    """Parses a distribution of lengths of at least 1. Raises ValueError naming `option`."""
    try:
        if text.startswith("lognormal:"):
            return _lognormal(*map(float, text.removeprefix("lognormal:").split(",")))
        if "-" in text:
            return _uniform(*map(int, text.split("-")))
        return _uniform(int(text), int(text))
    except (ValueError, TypeError):
        raise ValueError(f"{option}: {text!r} is not a length; use {SHAPES}") from None


def _uniform(low: int, high: int) -> Draw:
    if not 1 <= low <= high <= MAX_TOKENS:
        raise ValueError
    return lambda rng: rng.randint(low, high)


def _lognormal(median: float, sigma: float) -> Draw:
    if not (1 <= median <= MAX_TOKENS and 0 <= sigma <= 10):
        raise ValueError
    return lambda rng: max(1, min(MAX_TOKENS, round(median * rng.lognormvariate(0, sigma))))
