"""Principal axes of the encoder states, and ranks of lengths."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.predictor.models.frame import Frame, states
from services.predictor.models.spread import Floats


@dataclass(frozen=True)
class Axes:
    """Principal axes of the encoder states and an indicator column per known name."""

    middle: NDArray[np.float32]
    deviation: NDArray[np.float32]
    axes: NDArray[np.float32]  # [states, axes]
    names: tuple[tuple[str, ...], tuple[str, ...]]  # models, applications

    @staticmethod
    def fit(frame: Frame, count: int) -> "Axes":
        from sklearn.decomposition import PCA  # a second to load; only fits need it

        values = np.concatenate(states(frame), axis=1)
        middle, deviation = values.mean(axis=0), values.std(axis=0) + 1e-4
        scaled = (values - middle) / deviation
        most = min(count, *scaled.shape)
        with np.errstate(invalid="ignore"):  # identical states (no encoder) give 0/0
            found = PCA(most, random_state=0).fit(scaled)  # three times faster than eigh
        known = (tuple(sorted(set(frame.models))), tuple(sorted(set(frame.applications))))
        return Axes(middle, deviation, np.ascontiguousarray(found.components_.T), known)

    def columns(self, frame: Frame) -> NDArray[np.float32]:
        scaled = (np.concatenate(states(frame), axis=1) - self.middle) / self.deviation
        given = zip((frame.models, frame.applications), self.names, strict=True)
        named = [np.array([[n == k for k in known] for n in names]) for names, known in given]
        flags = [n.reshape(len(frame), -1).astype(np.float32) for n in named]
        return np.concatenate([scaled @ self.axes, frame.numbers, *flags], axis=1)


def ranks(lengths: Floats) -> Floats:
    """Rank of each length in (0, 1); ties share their mean rank."""
    _, inverse, counts = np.unique(lengths, return_inverse=True, return_counts=True)
    return np.asarray(((np.cumsum(counts) - counts / 2) / len(lengths))[inverse], float)
