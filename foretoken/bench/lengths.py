"""How long prompts and answers are to be: a number, a range, or a lognormal. Pure."""

from collections.abc import Callable
from random import Random

MOST_TOKENS = 10_000_000
SHAPES = "128, 64-512 (each as likely), or lognormal:MEDIAN,SIGMA"

Draw = Callable[[Random], int]


def length_of(text: str, option: str) -> Draw:
    """The distribution that `text` spells; what it draws is at least 1. Raises ValueError that
    names `option`."""
    try:
        if text.startswith("lognormal:"):
            return _lognormal(*map(float, text.removeprefix("lognormal:").split(",")))
        if "-" in text:
            return _between(*map(int, text.split("-")))
        return _between(int(text), int(text))
    except (ValueError, TypeError):
        raise ValueError(f"{option} takes tokens as {SHAPES}; got {text!r}") from None


def _between(low: int, high: int) -> Draw:
    if not 1 <= low <= high <= MOST_TOKENS:
        raise ValueError
    return lambda rng: rng.randint(low, high)


def _lognormal(median: float, sigma: float) -> Draw:
    if not (1 <= median <= MOST_TOKENS and 0 <= sigma <= 10):
        raise ValueError
    return lambda rng: max(1, min(MOST_TOKENS, round(median * rng.lognormvariate(0, sigma))))
