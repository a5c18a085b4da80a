"""Ridge regression of the length's rank on words and embeddings."""

from dataclasses import dataclass, replace

import numpy as np
import scipy.sparse as sparse

from services.predictor.models.axes import Axes, ranks
from services.predictor.models.fitting import Fitted, Model, ProgressCallback, Rows, cross_fit
from services.predictor.models.frame import Frame
from services.predictor.models.preparation import FeatureSelection, Preparation
from services.predictor.models.scale import Scale
from services.predictor.models.spread import Floats

_PENALTY = 3.0
_AXES = 128
_EMBEDDING_SCALE, _NUMBER_SCALE = 3.0, 0.2  # relative to 1 for the bag of words


@dataclass(frozen=True)
class DesignMatrix:
    """Sparse design matrix: bag of words, principal axes, sizes and names."""

    preparation: Preparation
    axes: Axes
    middle: Floats
    gain: Floats

    @staticmethod
    def fit(frame: Frame) -> "DesignMatrix":
        axes = Axes.fit(frame, _AXES)
        dense = axes.columns(frame)
        embedding = axes.axes.shape[1]
        deviation = dense.std(axis=0) + 1e-4
        gain = _NUMBER_SCALE / deviation
        gain[:embedding] = _EMBEDDING_SCALE / np.sqrt((deviation[:embedding] ** 2).sum())
        return DesignMatrix(
            Preparation.fit(frame, FeatureSelection()), axes, dense.mean(axis=0), gain
        )

    def matrix(self, frame: Frame) -> sparse.csr_matrix:
        columns = self.preparation.columns(frame)
        ends = np.append(columns.starts, len(columns.words))
        shape = (len(frame), len(self.preparation.idf))
        bag = sparse.csr_matrix((columns.weights, columns.words, ends), shape)
        dense = (self.axes.columns(frame) - self.middle) * self.gain
        return sparse.hstack([bag, sparse.csr_matrix(dense)], format="csr")

    def product(self, frame: Frame, slopes: Floats) -> Floats:
        """`matrix(frame) @ slopes` without building the matrix, which is faster for few rows."""
        columns = self.preparation.columns(frame)
        words = len(self.preparation.idf)
        counted = np.append(0.0, np.cumsum(columns.weights * slopes[columns.words]))
        starts = columns.starts
        bags = counted[np.append(starts[1:], len(columns.words))] - counted[starts]
        dense = (self.axes.columns(frame) - self.middle) * self.gain
        return np.asarray(bags + dense @ slopes[words:], float)


@dataclass(frozen=True)
class LinearModel:
    """A linear score and the lengths observed at each score."""

    design: DesignMatrix
    slopes: Floats
    scale: Scale

    def spread(self, frame: Frame) -> Floats:
        return self.scale.spread(self.design.product(frame, self.slopes))


def fit_ridge(frame: Frame, lengths: Floats, seed: int, tick: ProgressCallback) -> Fitted:
    """Fits TF-IDF and embeddings → rank of the length → lengths of that rank."""
    return _fit(frame, frame, lengths, seed, tick)


@dataclass(frozen=True)
class WordsOnlyModel:
    """A linear model that ignores embeddings, for prompts that no encoder has read."""

    linear: Model

    def spread(self, frame: Frame) -> Floats:
        return self.linear.spread(_without_embeddings(frame))


def fit_words(frame: Frame, lengths: Floats, seed: int, tick: ProgressCallback) -> Fitted:
    """Fits TF-IDF and sizes → rank of the length → lengths of that rank."""
    fitted = _fit(frame, _without_embeddings(frame), lengths, seed, tick)
    return replace(fitted, model=WordsOnlyModel(fitted.model))


def _without_embeddings(frame: Frame) -> Frame:
    zeros = np.zeros((len(frame), 1, 1), np.float32)
    return replace(frame, instruction=zeros, user_input=zeros)


def _fit(
    frame: Frame, visible: Frame, lengths: Floats, seed: int, tick: ProgressCallback
) -> Fitted:
    """Fits to `visible`; `frame` defines which rows share a prompt."""
    from sklearn.linear_model import Ridge  # a second to load; only fits need it

    design = DesignMatrix.fit(visible)
    matrix = design.matrix(visible)

    def fit(rows: Rows) -> Floats:
        ridge = Ridge(alpha=_PENALTY, solver="lsqr", tol=1e-3)
        return np.asarray(ridge.fit(matrix[rows], ranks(lengths[rows]) - 0.5).coef_, float)

    slopes, out_of_fold = cross_fit(
        frame, seed, tick, fit, lambda slope, rows: np.asarray(matrix[rows] @ slope)[:, None]
    )
    scale = Scale.fit(out_of_fold[:, 0], lengths)
    linear = LinearModel(design, np.mean(slopes, axis=0), scale)
    return Fitted(linear, scale.spread(out_of_fold[:, 0]))
