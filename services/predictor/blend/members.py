"""Members: what a content predictor is made of, each with what it has learnt so far."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from services.predictor.interface import Example, Options, Query
from services.predictor.models.fitting import Fit, Fitted, Model, Tick
from services.predictor.models.frame import Frame
from services.predictor.models.history import HistoryPredictor
from services.predictor.models.spread import Floats, of_samples

ANYONE = "*"  # the population of all models together


class Member(Protocol):
    """One way to foretell. `fit` is what the background does for it; `adopt` takes the result."""

    @property
    def fit(self) -> Fit: ...

    @property
    def ready(self) -> bool: ...

    def adopt(self, model: Model) -> None: ...

    def learn(self, frame: Frame, examples: Sequence[Example]) -> None:
        """What can be learnt at once, outcome by outcome; the frame is the examples' columns."""
        ...

    def spread(self, frame: Frame) -> Floats:
        """[n, 64]; only when ready."""
        ...


class FittedMember:
    """A member that knows only what it was last fitted on."""

    def __init__(self, fit: Fit):
        self.fit = fit
        self._model: Model | None = None

    @property
    def ready(self) -> bool:
        return self._model is not None

    def adopt(self, model: Model) -> None:
        self._model = model

    def learn(self, frame: Frame, examples: Sequence[Example]) -> None:
        """Nothing until the next fit."""

    def spread(self, frame: Frame) -> Floats:
        assert self._model is not None, "asked before it was ready"
        return self._model.spread(frame)


class HistoryMember:
    """The last lengths of the same model and application; of everything, for an unknown model.

    It speaks once it has learnt, so it takes no safe start; a spread needs a number for answers
    that were cut, and takes the longest met.
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
        """Nothing: history has learnt outcome by outcome."""

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
        made: dict[int, Floats] = {}
        rows = []
        for forecast in self._history.forecast(queries):
            if id(forecast) not in made:
                cut = forecast.truncated(self._longest)
                points, weights = np.array([cut.points]), np.array([cut.weights])
                made[id(forecast)] = of_samples(points, weights)[0]
            rows.append(made[id(forecast)])
        return np.stack(rows)


class _NoModel:
    """What history is fitted to: it is never asked."""

    def spread(self, frame: Frame) -> Floats:
        raise AssertionError("history has no fitted model")


def fit_history(frame: Frame, lengths: Floats, seed: int, tick: Tick) -> Fitted:
    """What history says of each row, once it has seen all of them."""
    member = HistoryMember(Options(window=len(lengths)))
    examples = [
        Example(Query(model, application, 0, int(length)), int(length))
        for model, application, length in zip(
            frame.models, frame.applications, lengths, strict=True
        )
    ]
    member.learn(frame, examples)
    return Fitted(_NoModel(), member.spread(frame))
