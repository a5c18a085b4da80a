"""Sets a prompt model aside while it is less accurate than history."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from services.forecast import Forecast
from services.predictor.interface import Example, Predictor, Query
from services.predictor.models.history import SOURCE as HISTORY

WINDOW = 1_000  # outcomes in a full comparison
MIN_OUTCOMES = 200  # fewer outcomes depend on a few long answers
SIGNIFICANT_STD_ERRORS = 2.0  # required of the mean difference before the window is full


@dataclass(frozen=True, slots=True)
class ForecastPair:
    """The forecasts of a request at one time: the one given, and the two that are compared.

    `by_model` is None when no model read the prompt.
    """

    given: Forecast
    by_history: Forecast
    by_model: Forecast | None = None


class ModelGuard:
    """Compares the model's losses with history's and sets the model aside or reinstates it.

    A full window decides by any difference, a shorter one only by a significant one. Each change
    restarts the comparison, so changes are at least MIN_OUTCOMES outcomes apart.
    """

    def __init__(self) -> None:
        self.set_aside = False
        self._excess: deque[float] = deque(maxlen=WINDOW)

    def observe(self, excess: Sequence[float]) -> bool:
        """Adds the model's losses minus history's, one per outcome. Returns whether the decision
        changed."""
        self._excess.extend(excess)
        if len(self._excess) < MIN_OUTCOMES:
            return False
        differences = np.array(self._excess)
        error = differences.std() / np.sqrt(len(differences))
        margin = 0.0 if len(differences) == WINDOW else SIGNIFICANT_STD_ERRORS * error
        worse = differences.mean() * (-1 if self.set_aside else 1)
        if worse <= margin:
            return False
        self.set_aside = not self.set_aside
        self._excess.clear()
        return True


class PromptModel(Predictor, Protocol):
    """The part of ContentPredictor that is guarded."""

    @property
    def edition(self) -> int: ...

    def by_words(self, batch: Sequence[Query]) -> list[Forecast | None]: ...


class PlainForecaster:
    """Serves the forecasts of a predictor that reads no prompts."""

    set_aside = False
    edition = 0

    def __init__(self, predictor: Predictor):
        self._predictor = predictor

    @property
    def version(self) -> int:
        return self._predictor.version

    def forecast(self, batch: Sequence[Query]) -> list[ForecastPair]:
        return [ForecastPair(forecast, forecast) for forecast in self._predictor.forecast(batch)]

    def by_history(self, batch: Sequence[Query]) -> list[Forecast]:
        return self._predictor.forecast(batch)

    def choose(self, by_model: Forecast, by_history: Forecast) -> ForecastPair:
        return ForecastPair(by_history, by_history)

    def learn(self, examples: Sequence[Example]) -> int:
        return self._predictor.learn(examples)

    def study(self, examples: Sequence[Example]) -> None:
        """Does nothing: `learn` has learned everything."""

    def compare(self, excess: Sequence[float]) -> bool:
        """Returns False: there is no second model."""
        return False


class GuardedForecaster:
    """Serves a prompt model or history, whichever the guard selects. Both learn from all outcomes.

    History also answers when the model cannot. It learns at once; the model learns in `study`.
    `read` and `study` take milliseconds and touch the model alone, so they may run in another
    thread, one at a time. All other methods are fast.
    """

    def __init__(self, model: PromptModel, history: Predictor):
        self._model = model
        self._history = history
        self._guard = ModelGuard()

    @property
    def version(self) -> int:
        """Version of history, the source of shared forecasts."""
        return self._history.version

    @property
    def set_aside(self) -> bool:
        return self._guard.set_aside

    @property
    def edition(self) -> int:
        """Edition of the model: increases when the forecast of a known prompt may change."""
        return self._model.edition

    def forecast(self, batch: Sequence[Query]) -> list[ForecastPair]:
        """Immediate forecasts: from words when the model can, else from history."""
        pairs = zip(self._model.by_words(batch), self._history.forecast(batch), strict=True)
        return [
            self.choose(by_words, by_history) if by_words else ForecastPair(by_history, by_history)
            for by_words, by_history in pairs
        ]

    def by_history(self, batch: Sequence[Query]) -> list[Forecast]:
        return self._history.forecast(batch)

    def read(self, batch: Sequence[Query]) -> list[Forecast | None]:
        """The model's forecasts of queries with features; None when it has none."""
        forecasts = self._model.forecast(batch)
        return [None if forecast.source == HISTORY else forecast for forecast in forecasts]

    def choose(self, by_model: Forecast, by_history: Forecast) -> ForecastPair:
        """Pairs both forecasts and selects the one to give."""
        return ForecastPair(by_history if self.set_aside else by_model, by_history, by_model)

    def learn(self, examples: Sequence[Example]) -> int:
        return self._history.learn(examples)

    def study(self, examples: Sequence[Example]) -> None:
        self._model.learn(examples)

    def compare(self, excess: Sequence[float]) -> bool:
        """See `ModelGuard.observe`."""
        return self._guard.observe(excess)


Forecaster = PlainForecaster | GuardedForecaster
