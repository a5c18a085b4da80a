"""ALISE's forecast by retrieval (papers/001 §3.1): answers to like prompts are as long."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from usearch.index import Index

from services.predictor.interface import Example
from services.predictor.models.fitting import Fitted, Model, Rows, Tick, by_parts, untold
from services.predictor.models.frame import Frame, sentences
from services.predictor.models.nets.recipes import fit_proxy
from services.predictor.models.spread import Floats, average, of_samples

NEIGHBOURS = 32
_SHARPNESS = 12.0  # of weights over similarity: 0.1 nearer counts exp(1.2) times as much
_WIDTHS = (0.8, 1.0, 1.25)  # a neighbour's length stands for lengths near it
_EXPANSION = 64  # candidates looked at for a new entry: half usearch's, for half the time


@dataclass(frozen=True)
class Neighbours:
    """A batch's neighbours: their lengths and similarities [n, k], the best similarity [n]."""

    lengths: Floats
    similarities: Floats

    @property
    def best(self) -> Floats:
        return np.asarray(self.similarities.max(axis=1))

    def spread(self) -> Floats:
        """Lengths weighted by similarity (ALGORITHMS §2), sharpened."""
        weights = np.exp(_SHARPNESS * (self.similarities - self.best[:, None]))
        samples = np.concatenate([self.lengths * width for width in _WIDTHS], axis=1)
        return np.maximum(of_samples(samples, np.tile(weights, len(_WIDTHS))), 1)

    def spread_plainly(self) -> Floats:
        """The paper's weights, the similarities themselves: the mean is its Σ sim·L / Σ sim, as
        closely as the levels of a spread say it. All alike where none is similar."""
        weights = np.maximum(self.similarities, 0.0)
        weights[self.best <= 0] = 1.0
        return np.maximum(of_samples(self.lengths, weights), 1)


Told = Callable[[Neighbours], Floats]


class Memory:
    """The last `window` (embedding, length) pairs in a usearch index; the oldest are forgotten.

    A prompt's vector is its two sentence embeddings end to end, so the similarity of two prompts
    is the mean of their instructions' and their inputs'.
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
        """Vectors [n, dim], finite; O(log window) each."""
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
        self._forget()

    def find(self, vectors: NDArray[np.float32]) -> Neighbours:
        """The nearest remembered; k is NEIGHBOURS, or as many as there are."""
        assert self._index is not None, "asked before anything was remembered"
        k = min(NEIGHBOURS, len(self))
        matches = self._index.search(vectors, k)
        keys = np.asarray(matches.keys).reshape(len(vectors), k)
        distances = np.asarray(matches.distances, float).reshape(len(vectors), k)
        lengths = np.array([[self._lengths.get(int(key), 0.0) for key in row] for row in keys])
        # A search may come back with fewer than k: what it left empty counts for nothing.
        return Neighbours(np.maximum(lengths, 1), np.where(lengths > 0, 1 - distances, -1.0))

    def _forget(self) -> None:
        assert self._index is not None
        excess = [self._order.popleft() for _ in range(len(self._order) - self._window)]
        if excess:
            self._index.remove(np.array(excess))
            for key in excess:
                del self._lengths[key]


def vectors(frame: Frame) -> NDArray[np.float32]:
    """[n, 2 · dim], unit length where there is any text."""
    joined = np.concatenate([sentences(frame.user_input), sentences(frame.instruction)], axis=1)
    norms = np.linalg.norm(joined, axis=1, keepdims=True)
    return np.asarray(joined / np.maximum(norms, 1e-9), np.float32)


class RetrievalMember:
    """Neighbours above the threshold of similarity; below it the regressor, where it is fitted."""

    def __init__(self, window: int, threshold: float, told: Told = Neighbours.spread):
        self.fit = Retrieve(window, threshold, told)
        self._told = told
        self._memory = Memory(window)
        self._threshold = threshold
        self._fallback: Model | None = None

    @property
    def ready(self) -> bool:
        return len(self._memory) > 0

    def adopt(self, model: Model) -> None:
        self._fallback = model

    def learn(self, frame: Frame, examples: Sequence[Example]) -> None:
        self._memory.add(vectors(frame), [e.output_tokens for e in examples])

    def spread(self, frame: Frame) -> Floats:
        found = self._memory.find(vectors(frame))
        if self._fallback is None or (found.best >= self._threshold).all():
            return self._told(found)
        return _either(found, self._told, self._fallback.spread(frame), self._threshold)


@dataclass(frozen=True)
class Retrieve:
    """The background's part: fits the regressor, and judges both on prompts unseen."""

    window: int
    threshold: float
    told: Told = Neighbours.spread

    def __call__(self, frame: Frame, lengths: Floats, seed: int, tick: Tick) -> Fitted:
        fallback = fit_proxy(frame, lengths, seed, tick)
        columns = vectors(frame)

        def fit(rows: Rows) -> Memory:
            memory = Memory(self.window)
            memory.add(columns[rows], lengths[rows].tolist())
            return memory

        def say(memory: Memory, rows: Rows) -> Floats:
            found = memory.find(columns[rows])
            return _either(found, self.told, fallback.unseen[rows], self.threshold)

        _, unseen = by_parts(frame, seed, untold, fit, say)
        return Fitted(fallback.model, unseen)


def _either(found: Neighbours, told: Told, fallback: Floats, threshold: float) -> Floats:
    """Neighbours where the best is near enough, the fallback elsewhere."""
    near = (found.best >= threshold).astype(float)[:, None]
    return average([told(found), fallback], np.concatenate([near, 1 - near], axis=1))
