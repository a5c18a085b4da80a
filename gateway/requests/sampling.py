"""Sampling parameters: what a request may ask for, checked field by field. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite

MAX_STOPS = 16
MAX_LOGPROBS = 20
SEED_SPAN = 2**64  # seeds are int64


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn, resolved: every field has a value, the seed included."""

    seed: int
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logprobs: int | None = None
    n: int = 1

    def seed_of(self, choice: int) -> int:
        """Choices of one prompt draw from neighbouring seeds; wraps at the ends of int64."""
        half = SEED_SPAN // 2
        return (self.seed + choice + half) % SEED_SPAN - half


@dataclass(frozen=True, slots=True)
class Range:
    """The values a number may take, and the sentence that says so."""

    allows: Callable[[float], bool]
    sentence: str


RANGES: dict[str, Range] = {
    "temperature": Range(lambda v: 0 <= v <= 2, "must be between 0 and 2"),
    "top_p": Range(lambda v: 1e-9 <= v <= 1, "must be above 0 and at most 1"),
    "top_k": Range(lambda v: v >= -1, "must be at least 1, or 0 or -1 for all tokens"),
    "min_p": Range(lambda v: 0 <= v <= 1, "must be between 0 and 1"),
    "max_tokens": Range(lambda v: v >= 1, "must be at least 1"),
    "min_tokens": Range(lambda v: v >= 0, "must not be negative"),
    "repetition_penalty": Range(lambda v: 1e-4 <= v <= 1e4, "must be between 0.0001 and 10000"),
    "presence_penalty": Range(lambda v: -2 <= v <= 2, "must be between -2 and 2"),
    "frequency_penalty": Range(lambda v: -2 <= v <= 2, "must be between -2 and 2"),
    "logprobs": Range(lambda v: 0 <= v <= MAX_LOGPROBS, f"must be between 0 and {MAX_LOGPROBS}"),
    "n": Range(lambda v: v >= 1, "must be at least 1"),
}


def fault_of(field: str, value: float) -> str | None:
    """What is wrong with a number, or None."""
    if not isfinite(value):
        return f"must be a finite number, not {value}"
    known = RANGES[field]
    return None if known.allows(value) else f"{known.sentence}, not {value:g}"


def fault_of_stops(stops: Sequence[str], max_chars: int) -> str | None:
    """What is wrong with the stop strings, or None."""
    if len(stops) > MAX_STOPS:
        return f"at most {MAX_STOPS} strings, got {len(stops)}"
    if not all(stops):
        return "a stop string must not be empty"
    longest = max(map(len, stops), default=0)
    return f"at most {max_chars} characters each, got {longest}" if longest > max_chars else None
