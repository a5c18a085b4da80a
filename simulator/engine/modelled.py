"""A predictor modelled by its error, for a paper's predictor without its model and data."""

from collections.abc import Callable, Sequence

import numpy as np

from services.core import Outcome, Request
from services.forecast import Forecast, certain

# Magnus (Cheng et al., ICWS 2024), Table II: USIN, the full predictor, with ChatGLM-6B.
MAGNUS_RMSE_TOKENS = 15.649


class NoisyLengths:
    """Forecasts the true length with a normal error, the same whenever a request is asked about.

    It never learns. Only the size of the error is a paper's; that of a learned predictor grows with
    the length.
    """

    def __init__(self, answer_tokens: Callable[[str], int], rmse_tokens: float, seed: int):
        self._answer_tokens = answer_tokens
        self._rmse_tokens, self._seed = rmse_tokens, seed

    def forecast(self, requests: Sequence[Request]) -> list[Forecast]:
        return [certain(self._draw(r.request_id), "modelled") for r in requests]

    def learn(self, outcome: Outcome, now: float) -> None:
        """Does nothing."""

    def _draw(self, request_id: str) -> int:
        rng = np.random.default_rng([self._seed, int(request_id)])
        drawn = self._answer_tokens(request_id) + self._rmse_tokens * rng.standard_normal()
        return max(1, round(drawn))
