"""The forecast to use when the predictor does not answer: the lengths of recent outcomes."""

from services.core import Outcome, Request
from services.forecast import Forecast
from services.lengths import LengthWindow


class History:
    """Output lengths of the last finished requests, whatever their prompts."""

    def __init__(self) -> None:
        self._lengths = LengthWindow()

    def learn(self, outcome: Outcome) -> None:
        self._lengths.learn(outcome)

    def forecast(self, request: Request) -> Forecast:
        """Their distribution; `max_tokens` without outcomes."""
        return self._lengths.forecast("fallback").truncated(request.max_tokens)
