"""Forecasts of running requests, kept until their outcomes arrive."""

from dataclasses import dataclass

from services.predictor.blend.guarded_forecaster import ForecastPair
from services.predictor.interface import Prompt
from services.predictor.serving.newest_first_queue import NewestFirstQueue


@dataclass(frozen=True, slots=True)
class PendingForecast:
    """A request's forecast and its inputs.

    packed: features in the log's format, empty for none. prompt: the text, only if it may be
    stored.
    """

    pair: ForecastPair
    packed: bytes = b""
    prompt: Prompt | None = None


class PendingForecasts(NewestFirstQueue[PendingForecast]):
    """Pending forecasts by request id. Requests without an id are not kept."""

    def put(self, key: str, item: PendingForecast) -> None:
        """Keeps the first forecast, which is the one to be judged, unless the new one has features:
        a forecast without features renews a shared forecast of a running request."""
        if key and (item.packed or self.get(key) is None):
            super().put(key, item)
