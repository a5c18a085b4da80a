"""A model has to be worth more than plain history: while it is not, it is set aside."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from services.forecast import Forecast
from services.predictor.interface import Example, Predictor, Query
from services.predictor.models.history import SOURCE as HISTORY

WINDOW = 1_000  # outcomes that model and history are compared over
LEAST = 200  # outcomes before a verdict; fewer are a matter of a few long answers
CLEARLY = (
    2.0  # standard errors of the mean difference that a verdict before the window is full needs
)


@dataclass(frozen=True, slots=True)
class Made:
    """What was foretold of a request at one moment: what was given, and what is judged.

    `by_model` is None where no model read the prompt.
    """

    given: Forecast
    by_history: Forecast
    by_model: Forecast | None = None


class Guard:
    """Sets a model aside and takes it back, by how much worse than history's its losses are.

    Over a full window any difference counts, before only a clear one. Each change begins the
    comparison anew, so there are at least LEAST outcomes between two changes.
    """

    def __init__(self) -> None:
        self.set_aside = False
        self._excess: deque[float] = deque(maxlen=WINDOW)

    def observe(self, excess: Sequence[float]) -> bool:
        """The model's losses less history's, an outcome each; whether this changed the verdict."""
        self._excess.extend(excess)
        if len(self._excess) < LEAST:
            return False
        differences = np.array(self._excess)
        error = differences.std() / np.sqrt(len(differences))
        margin = 0.0 if len(differences) == WINDOW else CLEARLY * error
        worse = differences.mean() * (-1 if self.set_aside else 1)
        if worse <= margin:
            return False
        self.set_aside = not self.set_aside
        self._excess.clear()
        return True


class Guardable(Predictor, Protocol):
    """Of `ContentPredictor`, what is guarded."""

    @property
    def edition(self) -> int: ...

    def by_words(self, batch: Sequence[Query]) -> list[Forecast | None]: ...


class Unguarded:
    """A predictor that stands for itself: what it says is given. It reads no prompts."""

    set_aside = False
    edition = 0

    def __init__(self, predictor: Predictor):
        self._predictor = predictor

    @property
    def version(self) -> int:
        return self._predictor.version

    def forecast(self, batch: Sequence[Query]) -> list[Made]:
        return [Made(forecast, forecast) for forecast in self._predictor.forecast(batch)]

    def by_history(self, batch: Sequence[Query]) -> list[Forecast]:
        return self._predictor.forecast(batch)

    def choose(self, by_model: Forecast, by_history: Forecast) -> Made:
        return Made(by_history, by_history)

    def learn(self, examples: Sequence[Example]) -> int:
        return self._predictor.learn(examples)

    def study(self, examples: Sequence[Example]) -> None:
        """It has learnt all there is."""

    def compare(self, excess: Sequence[float]) -> bool:
        """There is nothing to choose between."""
        return False


class Guarded:
    """A model beside history. Both foretell and learn everything; the guard says who is heard.

    Where the model has nothing to read or knows nothing yet, history is this one's, which learns
    at once; the model learns when it is told to `study`. `read` and `study` take milliseconds and
    touch the model alone, so they may run in another thread, one at a time; all else is quick.
    """

    def __init__(self, model: Guardable, history: Predictor):
        self._model = model
        self._history = history
        self._guard = Guard()

    @property
    def version(self) -> int:
        """Of what is shared: history."""
        return self._history.version

    @property
    def set_aside(self) -> bool:
        return self._guard.set_aside

    @property
    def edition(self) -> int:
        """Of the model: rises when it may say otherwise of the same prompt."""
        return self._model.edition

    def forecast(self, batch: Sequence[Query]) -> list[Made]:
        """At once: by words where the model can, else by history."""
        pairs = zip(self._model.by_words(batch), self._history.forecast(batch), strict=True)
        return [
            self.choose(by_words, by_history) if by_words else Made(by_history, by_history)
            for by_words, by_history in pairs
        ]

    def by_history(self, batch: Sequence[Query]) -> list[Forecast]:
        return self._history.forecast(batch)

    def read(self, batch: Sequence[Query]) -> list[Forecast | None]:
        """The model's word of queries with features; None where it knows nothing yet."""
        said = self._model.forecast(batch)
        return [None if forecast.source == HISTORY else forecast for forecast in said]

    def choose(self, by_model: Forecast, by_history: Forecast) -> Made:
        """What is given of the two."""
        return Made(by_history if self.set_aside else by_model, by_history, by_model)

    def learn(self, examples: Sequence[Example]) -> int:
        return self._history.learn(examples)

    def study(self, examples: Sequence[Example]) -> None:
        self._model.learn(examples)

    def compare(self, excess: Sequence[float]) -> bool:
        """As `Guard.observe`."""
        return self._guard.observe(excess)


Foreteller = Unguarded | Guarded
