"""Members of a content predictor with their learned state."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from services.predictor.interface import Example, Options, Query
from services.predictor.models.fitting import Fit, Fitted, Model, ProgressCallback
from services.predictor.models.frame import Frame
from services.predictor.models.history import HistoryPredictor
from services.predictor.models.spread import Floats, from_samples

ANYONE = "*"  # the population of all models


class Member(Protocol):
    """One forecasting method. `fit` runs in the background; `adopt` installs its result."""

    @property
    def fit(self) -> Fit: ...

    @property
    def ready(self) -> bool: ...

    def adopt(self, model: Model) -> None: ...

    def learn(self, frame: Frame, examples: Sequence[Example]) -> None:
        """Learns online from outcomes; `frame` holds the examples' columns."""
        ...

    def spread(self, frame: Frame) -> Floats:
        """[n, 64] quantiles; only when ready."""
        ...


class FittedMember:
    """A member that changes only when it is refitted."""

    def __init__(self, fit: Fit):
        self.fit = fit
        self._model: Model | None = None

    @property
    def ready(self) -> bool:
        return self._model is not None

    def adopt(self, model: Model) -> None:
        self._model = model

    def learn(self, frame: Frame, examples: Sequence[Example]) -> None:
        """Does nothing until the next fit."""

    def spread(self, frame: Frame) -> Floats:
        assert self._model is not None, "spread() called before the member is ready"
        return self._model.spread(frame)


class HistoryMember:
    """Recent lengths of the same model and application; of all models for an unknown one.

    It is ready only after it has learned, so it needs no prior. Truncated answers count as the
    longest length seen.
    """

    def __init__(self, options: Options):
        self.fit = fit_history
        self._history = HistoryPredictor(replace(options, prior=0.0))
        self._known: set[str] = set()
        self._longest = 1

    @property
    def ready(self) -> bool:
        return bool(self._known)

    def adopt(self, model: Model) -> None:
        """Does nothing: history learns online."""

    def learn(self, frame: Frame, examples: Sequence[Example]) -> None:
        for example in examples:
            self._known.add(example.query.model)
            self._longest = max(self._longest, example.output_tokens)
        pooled = [
            Example(Query(ANYONE, "", 0, e.query.max_tokens), e.output_tokens, e.reason)
            for e in examples
        ]
        self._history.learn([*examples, *pooled])

    def spread(self, frame: Frame) -> Floats:
        queries = [
            Query(model if model in self._known else ANYONE, application, 0, 1)
            for model, application in zip(frame.models, frame.applications, strict=True)
        ]
        by_forecast: dict[int, Floats] = {}  # forecasts are shared
        rows = []
        for forecast in self._history.forecast(queries):
            if id(forecast) not in by_forecast:
                cut = forecast.truncated(self._longest)
                points, weights = np.array([cut.points]), np.array([cut.weights])
                by_forecast[id(forecast)] = from_samples(points, weights)[0]
            rows.append(by_forecast[id(forecast)])
        return np.stack(rows)


class _NoModel:
    """Placeholder model of history, which is never used."""

    def spread(self, frame: Frame) -> Floats:
        raise AssertionError("history has no fitted model")


def fit_history(frame: Frame, lengths: Floats, seed: int, tick: ProgressCallback) -> Fitted:
    """Returns history's forecast of each row after all rows were learned."""
    member = HistoryMember(Options(window=len(lengths)))
    examples = [
        Example(Query(model, application, 0, int(length)), int(length))
        for model, application, length in zip(
            frame.models, frame.applications, lengths, strict=True
        )
    ]
    member.learn(frame, examples)
    return Fitted(_NoModel(), member.spread(frame))
