"""The forecaster that cannot be beaten, because it is told: the bound of a judgement.

What it is told are the judged rows themselves; the predictor of this name reads a file.
"""

from collections.abc import Sequence

from services.forecast import Forecast, certain
from services.predictor.interface import Example
from services.predictor.models.oracle import SOURCE

NAME = SOURCE


def forecast(examples: Sequence[Example]) -> list[Forecast]:
    """All mass on each example's true length."""
    return [certain(example.output_tokens, NAME) for example in examples]
