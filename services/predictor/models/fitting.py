"""Interfaces of model fitting, and cross-fitting."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from services.predictor.models.frame import Frame, prompts
from services.predictor.models.spread import Floats

ProgressCallback = Callable[[float], None]
"""Called with the share of the work done, in [0, 1]."""


def ignore_progress(share: float) -> None:
    """A ProgressCallback that does nothing."""


PARTS = 4

Rows = NDArray[np.int64]
T = TypeVar("T")


class Model(Protocol):
    """A fitted, immutable, picklable model."""

    def spread(self, frame: Frame) -> Floats:
        """[n, 64]: quantiles of the length of each row."""
        ...


@dataclass(frozen=True)
class Fitted:
    """A model and its out-of-fold quantiles for each training row."""

    model: Model
    out_of_fold: Floats


Fit = Callable[[Frame, Floats, int, ProgressCallback], Fitted]
"""(frame, lengths [n], seed, tick) → Fitted; deterministic by the seed except for rounding."""


def cross_fit(
    frame: Frame,
    seed: int,
    tick: ProgressCallback,
    fit: Callable[[Rows], T],
    predict: Callable[[T, Rows], Floats],
) -> tuple[list[T], Floats]:
    """Fits one model per part on all other parts. Returns the models and their out-of-fold outputs
    [n, k].

    Rows of one prompt are in the same part. Together the models form the predictor.
    """
    models: list[T] = []
    outputs: list[tuple[Rows, Floats]] = []
    for others, rows in _folds(frame, seed):
        models.append(fit(others))
        outputs.append((rows, predict(models[-1], rows)))
        tick(len(models) / PARTS)
    out_of_fold = np.empty((len(frame), outputs[0][1].shape[1]))
    for rows, of_part in outputs:
        out_of_fold[rows] = of_part
    return models, out_of_fold


def _folds(frame: Frame, seed: int) -> Iterator[tuple[Rows, Rows]]:
    """Yields PARTS pairs of training rows and held-out rows."""
    from sklearn.model_selection import GroupKFold  # takes seconds to import

    prompt = prompts(frame)
    if len(np.unique(prompt)) < PARTS:  # a part would be empty: split rows, not prompts
        prompt = np.arange(len(frame))
    folds: Iterator[tuple[Rows, Rows]] = GroupKFold(PARTS, shuffle=True, random_state=seed).split(
        prompt, groups=prompt
    )
    return folds
