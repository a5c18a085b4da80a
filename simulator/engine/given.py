"""The predictor `given`: the workload's own forecasts, for a predictor that is modelled or was run
elsewhere."""

from collections.abc import Sequence

from services.core import LiveAnswers, Outcome, Request
from services.forecast import Forecast, certain
from services.predictor.interface import Example
from simulator.workload.workload import Workload

GIVEN = "given"


class GivenLengths:
    """Forecasts one length per request. It never learns."""

    encodes = False

    def __init__(self, forecast_tokens: Sequence[int]):
        self._forecast_tokens = forecast_tokens

    def forecast(self, requests: Sequence[Request]) -> list[Forecast]:
        return [certain(self._forecast_tokens[int(r.request_id)], GIVEN) for r in requests]

    def study(self, examples: Sequence[Example]) -> None:
        """Does nothing."""

    def learn(self, outcome: Outcome, now: float) -> None:
        """Does nothing."""

    def observe_live(self, answers: Sequence[LiveAnswers]) -> None:
        """Does nothing."""


def forecast_given(workload: Workload) -> GivenLengths:
    """The forecasts of the workload. Raises ValueError if it has none."""
    if not workload.forecast_tokens:
        raise ValueError(
            f"the predictor 'given' answers a workload's own forecasts, and {workload.name} has "
            "none: choose another predictor, such as history, max or oracle"
        )
    return GivenLengths(workload.forecast_tokens)
