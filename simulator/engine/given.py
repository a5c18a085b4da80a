"""The predictor `given`: the workload's own forecasts, for a predictor that is modelled or was run
elsewhere."""

from collections.abc import Callable, Sequence

from services.core import LiveAnswers, Outcome, Request
from services.forecast import Forecast, certain
from services.predictor.interface import Example
from simulator.workload.workload import Workload

GIVEN = "given"


class KnownForecasts:
    """Answers `forecast_of` a request's id. It never learns."""

    encodes = False

    def __init__(self, forecast_of: Callable[[str], Forecast]):
        self._forecast_of = forecast_of

    def forecast(self, requests: Sequence[Request]) -> list[Forecast]:
        return [self._forecast_of(request.request_id) for request in requests]

    def study(self, examples: Sequence[Example]) -> None:
        """Does nothing."""

    def learn(self, outcome: Outcome, now: float) -> None:
        """Does nothing."""

    def observe_live(self, answers: Sequence[LiveAnswers]) -> None:
        """Does nothing."""


def known_lengths(tokens: Callable[[str], int], source: str) -> KnownForecasts:
    """Forecasts one length per request, `tokens` of its id, as certain."""
    return KnownForecasts(lambda request_id: certain(tokens(request_id), source))


def forecast_given(workload: Workload) -> KnownForecasts:
    """The forecasts of the workload. Raises ValueError if it has none."""
    if workload.forecasts:
        return KnownForecasts(lambda request_id: workload.forecasts[int(request_id)])
    if not workload.forecast_tokens:
        raise ValueError(
            f"the predictor 'given' answers a workload's own forecasts, and {workload.name} has "
            "none: choose another predictor, such as history, max or oracle"
        )
    tokens = workload.forecast_tokens
    return known_lengths(lambda request_id: tokens[int(request_id)], GIVEN)
