"""Forecasts by a prompt model, or by history where a guard sets the model aside."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Protocol

from services.core import LiveAnswers
from services.forecast import Forecast, certain
from services.predictor.blend.guard import Application, ApplicationGuards, Decision
from services.predictor.interface import Example, Predictor, Query
from services.predictor.models.history import SOURCE as HISTORY
from services.predictor.models.oracle import NO_LENGTH


@dataclass(frozen=True, slots=True)
class ForecastPair:
    """The forecasts of a request at one time: the given one, and the two that are compared.

    `by_model` is None when no model read the prompt.
    """

    given: Forecast
    by_history: Forecast
    by_model: Forecast | None = None


class PromptModel(Predictor, Protocol):
    """The methods of ContentPredictor that are guarded."""

    @property
    def edition(self) -> int: ...

    def by_words(self, batch: Sequence[Query]) -> list[Forecast | None]: ...


class GuardedForecaster:
    """Serves a prompt model or history, whichever the guard of the application selects; history
    alone without a model.

    Both learn from all outcomes: history at once in `learn`, the model in `study`. History also
    answers when the model cannot. `read` and `study` take milliseconds and touch the model alone,
    so they may run in another thread, one at a time. All other methods are fast.
    """

    def __init__(self, history: Predictor, model: PromptModel | None = None):
        self._history = history
        self._model = model
        self._guards = ApplicationGuards()

    @property
    def version(self) -> int:
        """Version of history, the source of shared forecasts."""
        return self._history.version

    @property
    def set_aside(self) -> int:
        """Guards that set the model aside."""
        return self._guards.count_set_aside

    @property
    def edition(self) -> int:
        """Increases when the model's forecast of a known prompt may change."""
        return self._model.edition if self._model else 0

    def forecast(self, batch: Sequence[Query]) -> list[ForecastPair]:
        """Returns immediate forecasts: from words when the model can, else from history."""
        words = self._model.by_words(batch) if self._model else repeat(None, len(batch))
        forecasts = zip(batch, words, self._history.forecast(batch), strict=True)
        return [
            self.choose(query, by_words, by_history)
            if by_words
            else ForecastPair(by_history, by_history)
            for query, by_words, by_history in forecasts
        ]

    def by_history(self, batch: Sequence[Query]) -> list[Forecast]:
        return self._history.forecast(batch)

    def read(self, batch: Sequence[Query]) -> list[Forecast | None]:
        """Returns the model's forecasts of queries with features; None when it has none."""
        forecasts = self._model.forecast(batch) if self._model else []
        return [None if f.source in (HISTORY, NO_LENGTH) else f for f in forecasts]

    def choose(self, query: Query, by_model: Forecast, by_history: Forecast) -> ForecastPair:
        """Pairs both forecasts of a query and selects the one to give."""
        aside = self._guards.is_set_aside((query.model, query.application))
        return ForecastPair(by_history if aside else by_model, by_history, by_model)

    def learn(self, examples: Sequence[Example]) -> int:
        """Learns lengths and returns how many were used. Takes microseconds."""
        return self._history.learn(examples)

    def observe_live(self, answers: Sequence[LiveAnswers]) -> None:
        """Replaces the answers that have not ended, for history."""
        self._history.observe_live(answers)

    def study(self, examples: Sequence[Example]) -> None:
        """Learns prompts with their lengths. Takes milliseconds."""
        if self._model:
            self._model.learn(examples)

    def compare(self, application: Application, excess: Sequence[float]) -> Decision | None:
        """Adds the model's losses minus history's of one application; see `ModelGuard.observe`."""
        return self._guards.observe(application, excess)


class PureForecaster(GuardedForecaster):
    """Gives the model's forecast whatever the guard would find, and `max_tokens` without one."""

    def forecast(self, batch: Sequence[Query]) -> list[ForecastPair]:
        return [
            ForecastPair(certain(query.max_tokens), by_history)
            for query, by_history in zip(batch, self.by_history(batch), strict=True)
        ]

    def compare(self, application: Application, excess: Sequence[float]) -> Decision | None:
        return None
