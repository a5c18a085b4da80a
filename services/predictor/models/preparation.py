"""Columns that models of words and states read: numbers, names and a bag of words."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.predictor.interface import WORD_COLUMNS
from services.predictor.models.frame import Frame, sentences, states


@dataclass(frozen=True)
class FeatureSelection:
    """Features that a model reads."""

    all_layers: bool = True
    words: bool = True
    numbers: bool = True
    names: bool = True  # model and application


@dataclass(frozen=True)
class Columns:
    """Columns of a batch; the bag of words in PyTorch's EmbeddingBag format."""

    dense: NDArray[np.float32]
    names: NDArray[np.int64]  # [n, 2]: model, application; 0 is unknown
    words: NDArray[np.int64]
    starts: NDArray[np.int64]
    weights: NDArray[np.float32]


@dataclass(frozen=True)
class Preparation:
    """Converts a Frame to Columns with the vocabulary, names, means and deviations of the training
    set."""

    view: FeatureSelection
    known: NDArray[np.int32]  # [WORD_COLUMNS]: index of a word, 0 when seen less than twice
    idf: NDArray[np.float32]  # by word index
    names: dict[str, int]
    middle: NDArray[np.float32]
    deviation: NDArray[np.float32]

    @staticmethod
    def fit(frame: Frame, view: FeatureSelection) -> "Preparation":
        counts = np.bincount(frame.words, minlength=WORD_COLUMNS)
        common = counts >= 2
        known = np.where(common, np.cumsum(common), 0).astype(np.int32)
        idf = np.log(max(len(frame), 2) / (1 + counts[common])).clip(1e-3)
        models = {f"model {n}" for n in frame.models}
        names = sorted(models | {f"application {n}" for n in frame.applications})
        dense = _dense(frame, view)
        return Preparation(
            view,
            known,
            np.concatenate([[0.0], idf]).astype(np.float32),
            {name: place for place, name in enumerate(names, start=1)},
            dense.mean(axis=0),
            dense.std(axis=0) + 1e-4,
        )

    def columns(self, frame: Frame) -> Columns:
        places = self.known[frame.words]
        rows = np.repeat(np.arange(len(frame)), np.diff(frame.starts))[places > 0]
        places = places[places > 0]
        weights = self.idf[places]
        norms = np.sqrt(np.bincount(rows, weights**2, len(frame))) + 1e-9
        known = self.names.get
        names = [
            (known(f"model {m}", 0), known(f"application {a}", 0))
            for m, a in zip(frame.models, frame.applications, strict=True)
        ]
        return Columns(
            (_dense(frame, self.view) - self.middle) / self.deviation,
            np.array(names, np.int64).reshape(-1, 2),
            places.astype(np.int64),
            np.searchsorted(rows, np.arange(len(frame))),
            (weights / norms[rows]).astype(np.float32),
        )


def _dense(frame: Frame, view: FeatureSelection) -> NDArray[np.float32]:
    if view.all_layers:
        parts = states(frame)
    else:
        parts = sentences(frame.instruction), sentences(frame.user_input)
    return np.concatenate((*parts, frame.numbers) if view.numbers else parts, axis=1)
