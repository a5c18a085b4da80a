"""The predictor that expects the worst: every answer runs to its max_tokens."""

from collections.abc import Sequence

from services.forecast import Forecast, certain
from services.predictor.interface import Example, Query


class MaxPredictor:
    """What TGI and FastGen assume of a request (papers/000 §2), as a forecast."""

    version = 0

    def forecast(self, batch: Sequence[Query]) -> list[Forecast]:
        return [certain(query.max_tokens, "max") for query in batch]

    def learn(self, examples: Sequence[Example]) -> int:
        """Nothing: what a request is allowed is all it knows."""
        return 0
