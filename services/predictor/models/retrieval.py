"""Forecasts by retrieval: similar prompts have answers of similar length (ALISE, Zhao et al., 2024,
§3.1)."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from usearch.index import Index

from services.predictor.interface import Example
from services.predictor.models.fitting import (
    Fitted,
    Model,
    ProgressCallback,
    Rows,
    cross_fit,
    ignore_progress,
)
from services.predictor.models.frame import Frame, sentences
from services.predictor.models.nets.recipes import fit_proxy
from services.predictor.models.spread import Floats, average, from_samples

NEIGHBOURS = 32
_SHARPNESS = 12.0  # weight exponent: 0.1 more similarity gives exp(1.2) times the weight
_WIDTHS = (0.8, 1.0, 1.25)  # factors that spread each neighbour's length
_EXPANSION = 64  # usearch's expansion_add; half the default halves the time


@dataclass(frozen=True)
class Neighbours:
    """Neighbours of a batch: lengths and similarities [n, k], and the best similarity [n]."""

    lengths: Floats
    similarities: Floats

    @property
    def best(self) -> Floats:
        return np.asarray(self.similarities.max(axis=1))

    def spread(self) -> Floats:
        """Lengths weighted by sharpened similarity."""
        weights = np.exp(_SHARPNESS * (self.similarities - self.best[:, None]))
        samples = np.concatenate([self.lengths * width for width in _WIDTHS], axis=1)
        return np.maximum(from_samples(samples, np.tile(weights, len(_WIDTHS))), 1)

    def spread_unsharpened(self, threshold: float) -> Floats:
        """Lengths of the neighbours above the threshold weighted by similarity as in ALISE, so that
        the mean is Σ sim·L / Σ sim within the resolution of 64 quantiles. Without one above it, all
        neighbours, with equal weights when none is similar."""
        weights = np.maximum(self.similarities, 0.0)
        matched = self.best >= threshold
        weights[matched] *= self.similarities[matched] >= threshold
        weights[self.best <= 0] = 1.0
        return np.maximum(from_samples(self.lengths, weights), 1)


ToQuantiles = Callable[[Neighbours], Floats]


class EmbeddingIndex:
    """A usearch index of the last `window` (embedding, length) pairs.

    A prompt's vector is its two sentence embeddings concatenated, so the similarity of two prompts
    is the mean similarity of their instructions and inputs.
    """

    def __init__(self, window: int):
        self._window = window
        self._index: Index | None = None
        self._lengths: dict[int, float] = {}
        self._order: deque[int] = deque()
        self._next = 0

    def __len__(self) -> int:
        return len(self._lengths)

    def add(self, vectors: NDArray[np.float32], lengths: Sequence[float]) -> None:
        """Adds finite vectors [n, dim]; O(log window) each."""
        if self._index is None:
            self._index = Index(
                ndim=vectors.shape[1], metric="cos", dtype="f16", expansion_add=_EXPANSION
            )
        keys = np.arange(self._next, self._next + len(vectors))
        self._next += len(vectors)
        self._index.add(keys, vectors)
        for key, length in zip(keys.tolist(), lengths, strict=True):
            self._lengths[key] = float(length)
            self._order.append(key)
        self._evict()

    def find(self, vectors: NDArray[np.float32]) -> Neighbours:
        """Returns the nearest NEIGHBOURS entries, or all when there are fewer."""
        assert self._index is not None, "find() called on an empty index"
        k = min(NEIGHBOURS, len(self))
        matches = self._index.search(vectors, k)
        keys = np.asarray(matches.keys).reshape(len(vectors), k)
        distances = np.asarray(matches.distances, float).reshape(len(vectors), k)
        lengths = np.array([[self._lengths.get(int(key), 0.0) for key in row] for row in keys])
        # A search may return fewer than k; missing neighbours get similarity -1.
        return Neighbours(np.maximum(lengths, 1), np.where(lengths > 0, 1 - distances, -1.0))

    def _evict(self) -> None:
        assert self._index is not None
        excess = [self._order.popleft() for _ in range(len(self._order) - self._window)]
        if excess:
            self._index.remove(np.array(excess))
            for key in excess:
                del self._lengths[key]


def vectors(frame: Frame) -> NDArray[np.float32]:
    """[n, 2 · dim], unit length unless the prompt is empty."""
    joined = np.concatenate([sentences(frame.user_input), sentences(frame.instruction)], axis=1)
    norms = np.linalg.norm(joined, axis=1, keepdims=True)
    return np.asarray(joined / np.maximum(norms, 1e-9), np.float32)


class RetrievalMember:
    """Neighbours above the similarity threshold, a regressor below it."""

    def __init__(
        self, window: int, threshold: float, to_quantiles: ToQuantiles = Neighbours.spread
    ):
        self.fit = RetrievalFit(window, threshold, to_quantiles)
        self._to_quantiles = to_quantiles
        self._lengths_index = EmbeddingIndex(window)
        self._threshold = threshold
        self._fallback: Model | None = None

    @property
    def ready(self) -> bool:
        return len(self._lengths_index) > 0

    def adopt(self, model: Model) -> None:
        self._fallback = model

    def learn(self, frame: Frame, examples: Sequence[Example]) -> None:
        self._lengths_index.add(vectors(frame), [e.output_tokens for e in examples])

    def spread(self, frame: Frame) -> Floats:
        found = self._lengths_index.find(vectors(frame))
        if self._fallback is None or (found.best >= self._threshold).all():
            return self._to_quantiles(found)
        return _neighbours_or_fallback(
            found, self._to_quantiles, self._fallback.spread(frame), self._threshold
        )


@dataclass(frozen=True)
class RetrievalFit:
    """Fits the regressor and makes out-of-fold forecasts of both."""

    window: int
    threshold: float
    to_quantiles: ToQuantiles = Neighbours.spread

    def __call__(self, frame: Frame, lengths: Floats, seed: int, tick: ProgressCallback) -> Fitted:
        fallback = fit_proxy(frame, lengths, seed, tick)
        columns = vectors(frame)

        def fit(rows: Rows) -> EmbeddingIndex:
            index = EmbeddingIndex(self.window)
            index.add(columns[rows], lengths[rows].tolist())
            return index

        def predict(index: EmbeddingIndex, rows: Rows) -> Floats:
            found = index.find(columns[rows])
            return _neighbours_or_fallback(
                found, self.to_quantiles, fallback.out_of_fold[rows], self.threshold
            )

        _, out_of_fold = cross_fit(frame, seed, ignore_progress, fit, predict)
        return Fitted(fallback.model, out_of_fold)


def _neighbours_or_fallback(
    found: Neighbours, to_quantiles: ToQuantiles, fallback: Floats, threshold: float
) -> Floats:
    """Neighbours for rows with a similar neighbour, the fallback for others."""
    near = (found.best >= threshold).astype(float)[:, None]
    return average([to_quantiles(found), fallback], np.concatenate([near, 1 - near], axis=1))
