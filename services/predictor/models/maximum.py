"""Forecasts max_tokens for every request."""

from collections.abc import Sequence

from services.forecast import Forecast, certain
from services.predictor.interface import Example, Query


class MaxPredictor:
    """The assumption of TGI and FastGen (Past-Future Scheduler, Gong et al., ASPLOS 2025, §2) as a
    forecast."""

    version = 0

    def forecast(self, batch: Sequence[Query]) -> list[Forecast]:
        return [certain(query.max_tokens, "max") for query in batch]

    def learn(self, examples: Sequence[Example]) -> int:
        """Does nothing."""
        return 0
