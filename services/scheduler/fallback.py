"""The forecast that stands in when the predictor does not answer: what finished here lately."""

from collections import deque

from services.core import Outcome, Request
from services.forecast import Forecast, certain, from_lengths

WINDOW = 1_000  # Past-Future's w


class History:
    """Output lengths of the last finished requests, whatever they were about."""

    def __init__(self) -> None:
        self._lengths: deque[int] = deque(maxlen=WINDOW)

    def learn(self, outcome: Outcome) -> None:
        self._lengths.append(max(1, outcome.output_tokens))

    def forecast(self, request: Request) -> Forecast:
        """Their distribution; `max_tokens` before there is any."""
        if not self._lengths:
            return certain(request.max_tokens, "fallback")
        return from_lengths(self._lengths, max(self._lengths), "fallback")
