"""A model has to be worth more than plain history: while it is not, it is set aside."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

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


class Unguarded:
    """A predictor that stands for itself: what it says is given."""

    set_aside = False

    def __init__(self, predictor: Predictor):
        self._predictor = predictor

    @property
    def version(self) -> int:
        return self._predictor.version

    def forecast(self, batch: Sequence[Query]) -> list[Made]:
        return [Made(forecast, forecast) for forecast in self._predictor.forecast(batch)]

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
    at once; the model learns when it is told to `study`.
    """

    def __init__(self, model: Predictor, history: Predictor):
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

    def forecast(self, batch: Sequence[Query]) -> list[Made]:
        pairs = zip(self._model.forecast(batch), self._history.forecast(batch), strict=True)
        return [self._made(by_model, by_history) for by_model, by_history in pairs]

    def learn(self, examples: Sequence[Example]) -> int:
        return self._history.learn(examples)

    def study(self, examples: Sequence[Example]) -> None:
        self._model.learn(examples)

    def compare(self, excess: Sequence[float]) -> bool:
        """As `Guard.observe`."""
        return self._guard.observe(excess)

    def _made(self, by_model: Forecast, by_history: Forecast) -> Made:
        if by_model.source == HISTORY:  # the model had nothing to read, or knows nothing yet
            return Made(by_history, by_history)
        return Made(by_history if self.set_aside else by_model, by_history, by_model)


Foreteller = Unguarded | Guarded
