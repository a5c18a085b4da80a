"""Outcomes that cannot be true: one of them would stay in the log, and in each later fit. Pure."""

from collections.abc import Callable, Mapping
from math import inf

from services.core import Outcome
from services.forecast import MAX_FORECAST_TOKENS
from services.predictor.learning.records import MAX_NAME_CHARS

MAX_PREEMPTIONS = 10**6

# By field: whether its value can be true.
CHECKS: Mapping[str, Callable[[Outcome], bool]] = {
    "request_id": lambda outcome: len(outcome.request_id) <= MAX_NAME_CHARS,
    "model": lambda outcome: len(outcome.model) <= MAX_NAME_CHARS,
    "application": lambda outcome: len(outcome.application) <= MAX_NAME_CHARS,
    "key_name": lambda outcome: len(outcome.key_name) <= MAX_NAME_CHARS,
    "prompt_tokens": lambda outcome: outcome.prompt_tokens <= MAX_FORECAST_TOKENS,
    "output_tokens": lambda outcome: outcome.output_tokens <= MAX_FORECAST_TOKENS,
    "max_tokens": lambda outcome: outcome.max_tokens <= MAX_FORECAST_TOKENS,
    "e2e_s": lambda outcome: 0 <= outcome.e2e_s < inf,  # and not NaN
    "preemptions": lambda outcome: outcome.preemptions <= MAX_PREEMPTIONS,
}


def find_implausible(outcome: Outcome) -> str:
    """The first field that cannot be true; empty if all can be."""
    return next((field for field, holds in CHECKS.items() if not holds(outcome)), "")
