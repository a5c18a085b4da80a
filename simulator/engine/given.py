"""The predictor `given`: the workload's own forecasts, for a predictor that is modelled or was run
elsewhere."""

from collections.abc import Callable, Sequence

from services.core import LiveAnswers, Outcome, Request
from services.forecast import Forecast, certain
from services.predictor.interface import Example
from simulator.workload.workload import Workload

GIVEN = "given"


class KnownLengths:
    """Forecasts one length per request, `tokens` of its id. It never learns."""

    encodes = False

    def __init__(self, tokens: Callable[[str], int], source: str):
        self._tokens, self._source = tokens, source

    def forecast(self, requests: Sequence[Request]) -> list[Forecast]:
        return [certain(self._tokens(r.request_id), self._source) for r in requests]

    def study(self, examples: Sequence[Example]) -> None:
        """Does nothing."""

    def learn(self, outcome: Outcome, now: float) -> None:
        """Does nothing."""

    def observe_live(self, answers: Sequence[LiveAnswers]) -> None:
        """Does nothing."""


def forecast_given(workload: Workload) -> KnownLengths:
    """The forecasts of the workload. Raises ValueError if it has none."""
    if not workload.forecast_tokens:
        raise ValueError(
            f"the predictor 'given' answers a workload's own forecasts, and {workload.name} has "
            "none: choose another predictor, such as history, max or oracle"
        )
    tokens = workload.forecast_tokens
    return KnownLengths(lambda request_id: tokens[int(request_id)], GIVEN)
