"""Words and meaning, straight: a ridge regression of the length's rank."""

from dataclasses import dataclass, replace

import numpy as np
import scipy.sparse as sparse
from sklearn.linear_model import Ridge

from services.predictor.models.fitting import Fitted, Model, Rows, Tick, by_parts
from services.predictor.models.forest import Axes, ranks
from services.predictor.models.frame import Frame
from services.predictor.models.nets.net import Preparation, View
from services.predictor.models.scale import Scale
from services.predictor.models.spread import Floats

_PENALTY = 3.0
_AXES = 128
_MEANING, _REST = 3.0, 0.2  # the meaning's size as a whole, and a number's, where a bag's is 1


@dataclass(frozen=True)
class Design:
    """A frame as one sparse matrix: the bag of words, and beside it meaning, sizes and names."""

    preparation: Preparation
    axes: Axes
    middle: Floats
    gain: Floats

    @staticmethod
    def fit(frame: Frame) -> "Design":
        axes = Axes.fit(frame, _AXES)
        dense = axes.columns(frame)
        meaning = axes.axes.shape[1]
        deviation = dense.std(axis=0) + 1e-4
        gain = _REST / deviation
        gain[:meaning] = _MEANING / np.sqrt((deviation[:meaning] ** 2).sum())
        return Design(Preparation.fit(frame, View()), axes, dense.mean(axis=0), gain)

    def of(self, frame: Frame) -> sparse.csr_matrix:
        inputs = self.preparation.inputs(frame)
        ends = np.append(inputs.starts.numpy(), len(inputs.words))
        shape = (len(frame), len(self.preparation.idf))
        bag = sparse.csr_matrix((inputs.weights.numpy(), inputs.words.numpy(), ends), shape)
        dense = (self.axes.columns(frame) - self.middle) * self.gain
        return sparse.hstack([bag, sparse.csr_matrix(dense)], format="csr")

    def product(self, frame: Frame, slopes: Floats) -> Floats:
        """`of(frame) @ slopes` without building the matrix, which few rows don't pay for."""
        inputs = self.preparation.inputs(frame)
        words = len(self.preparation.idf)
        counted = np.append(0.0, np.cumsum(inputs.weights.numpy() * slopes[inputs.words.numpy()]))
        starts = inputs.starts.numpy()
        bags = counted[np.append(starts[1:], len(inputs.words))] - counted[starts]
        dense = (self.axes.columns(frame) - self.middle) * self.gain
        return np.asarray(bags + dense @ slopes[words:], float)


@dataclass(frozen=True)
class Straight:
    """A linear score, and the lengths that such scores had."""

    columns: Design
    slopes: Floats
    scale: Scale

    def spread(self, frame: Frame) -> Floats:
        return self.scale.spread(self.columns.product(frame, self.slopes))


def fit_ridge(frame: Frame, lengths: Floats, seed: int, tick: Tick) -> Fitted:
    """TF-IDF and meaning → the length's rank → the lengths of that rank."""
    return _fit(frame, frame, lengths, seed, tick)


@dataclass(frozen=True)
class Blind:
    """The same, blind to meaning: for prompts that no encoder has read, and others."""

    straight: Model

    def spread(self, frame: Frame) -> Floats:
        return self.straight.spread(_blank(frame))


def fit_words(frame: Frame, lengths: Floats, seed: int, tick: Tick) -> Fitted:
    """TF-IDF and sizes → the length's rank → the lengths of that rank."""
    fitted = _fit(frame, _blank(frame), lengths, seed, tick)
    return replace(fitted, model=Blind(fitted.model))


def _blank(frame: Frame) -> Frame:
    nothing = np.zeros((len(frame), 1, 1), np.float32)
    return replace(frame, instruction=nothing, user_input=nothing)


def _fit(frame: Frame, seen: Frame, lengths: Floats, seed: int, tick: Tick) -> Fitted:
    """To what is `seen` of the frame, whose prompts part the rows."""
    columns = Design.fit(seen)
    matrix = columns.of(seen)

    def fit(rows: Rows) -> Floats:
        ridge = Ridge(alpha=_PENALTY, solver="lsqr", tol=1e-3)
        return np.asarray(ridge.fit(matrix[rows], ranks(lengths[rows]) - 0.5).coef_, float)

    slopes, unseen = by_parts(
        frame, seed, tick, fit, lambda slope, rows: np.asarray(matrix[rows] @ slope)[:, None]
    )
    scale = Scale.fit(unseen[:, 0], lengths)
    straight = Straight(columns, np.mean(slopes, axis=0), scale)
    return Fitted(straight, scale.spread(unseen[:, 0]))
