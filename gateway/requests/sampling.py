"""Checks of sampling parameters, field by field. Pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite

MAX_STOPS = 16
MAX_LOGPROBS = 20
MAX_STOP_TOKENS = 128
MAX_BIASES = 300  # OpenAI's limit
MAX_BIAS = 100.0
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 256


@dataclass(frozen=True, slots=True)
class Range:
    """The allowed values of a number, and the error sentence for others."""

    allows: Callable[[float], bool]
    sentence: str


_UP_TO_LOGPROBS = Range(lambda v: 0 <= v <= MAX_LOGPROBS, f"must be between 0 and {MAX_LOGPROBS}")

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
    "logprobs": _UP_TO_LOGPROBS,
    "prompt_logprobs": _UP_TO_LOGPROBS,
    "n": Range(lambda v: v >= 1, "must be at least 1"),
}

# Boolean fields.
SWITCHES = (
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)


def find_range_fault(field: str, value: float) -> str | None:
    """The error sentence for a number, or None."""
    if not isfinite(value):
        return f"must be a finite number, not {value}"
    allowed = RANGES[field]
    return None if allowed.allows(value) else f"{allowed.sentence}, not {value:g}"


def find_stop_fault(stops: Sequence[str], max_chars: int) -> str | None:
    """The error sentence for stop strings, or None."""
    if len(stops) > MAX_STOPS:
        return f"at most {MAX_STOPS} strings, got {len(stops)}"
    if not all(stops):
        return "a stop string must not be empty"
    longest = max(map(len, stops), default=0)
    return f"at most {max_chars} characters each, got {longest}" if longest > max_chars else None


def find_id_fault(ids: Sequence[int], vocabulary: int, max_ids: int) -> str | None:
    """The error sentence for a list of token ids, or None."""
    if len(ids) > max_ids:
        return f"at most {max_ids} token ids, got {len(ids)}"
    wrong = next((token for token in ids if not 0 <= token < vocabulary), None)
    return None if wrong is None else f"token id {wrong} is outside the vocabulary of {vocabulary}"


def find_bias_fault(bias: Mapping[int, float], vocabulary: int) -> str | None:
    """The error sentence for a logit bias, or None."""
    wrong = next((value for value in bias.values() if not -MAX_BIAS <= value <= MAX_BIAS), None)
    if wrong is not None:
        return f"must be between {-MAX_BIAS:g} and {MAX_BIAS:g}, not {wrong:g}"
    return find_id_fault(tuple(bias), vocabulary, MAX_BIASES)


def find_bad_word_fault(words: Sequence[str]) -> str | None:
    """The error sentence for words that an answer must not contain, or None."""
    if len(words) > MAX_BAD_WORDS:
        return f"at most {MAX_BAD_WORDS} words, got {len(words)}"
    if not all(word.strip() for word in words):
        return "a word must not be empty"
    longest = max(map(len, words), default=0)
    if longest > MAX_BAD_WORD_CHARS:
        return f"at most {MAX_BAD_WORD_CHARS} characters each, got {longest}"
    return None
