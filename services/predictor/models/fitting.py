"""What fitting a model is: from a frame and its true lengths to a model and unseen spreads."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from services.predictor.models.frame import Frame, prompts
from services.predictor.models.spread import Floats

Tick = Callable[[float], None]
"""Told the share of the work done, in [0, 1]."""


def untold(share: float) -> None:
    """A tick that tells nobody."""


PARTS = 4

Rows = NDArray[np.int64]
T = TypeVar("T")


class Model(Protocol):
    """Fitted, immutable, and can be pickled."""

    def spread(self, frame: Frame) -> Floats:
        """[n, 64]: the length distribution of each row."""
        ...


@dataclass(frozen=True)
class Fitted:
    """A model, and what it says of each row it was fitted on when it has not seen its prompt."""

    model: Model
    unseen: Floats


Fit = Callable[[Frame, Floats, int, Tick], Fitted]
"""(frame, lengths [n], seed, tick) → Fitted; the same by the seed, but for rounding."""


def by_parts(
    frame: Frame,
    seed: int,
    tick: Tick,
    fit: Callable[[Rows], T],
    say: Callable[[T, Rows], Floats],
) -> tuple[list[T], Floats]:
    """One model a part, fitted on all other parts, and what each says of its own [n, k].

    Rows of one prompt are in one part. Together the models are the predictor; what they say here
    they say unseen.
    """
    models: list[T] = []
    said: list[tuple[Rows, Floats]] = []
    for others, rows in _folds(frame, seed):
        models.append(fit(others))
        said.append((rows, say(models[-1], rows)))
        tick(len(models) / PARTS)
    unseen = np.empty((len(frame), said[0][1].shape[1]))
    for rows, of_part in said:
        unseen[rows] = of_part
    return models, unseen


def _folds(frame: Frame, seed: int) -> Iterator[tuple[Rows, Rows]]:
    """PARTS times all other rows, and a part's own."""
    from sklearn.model_selection import GroupKFold  # seconds that who only forecasts needs not

    prompt = prompts(frame)
    if len(np.unique(prompt)) < PARTS:  # a part would be empty: the rows are all there is to part
        prompt = np.arange(len(frame))
    folds: Iterator[tuple[Rows, Rows]] = GroupKFold(PARTS, shuffle=True, random_state=seed).split(
        prompt, groups=prompt
    )
    return folds
