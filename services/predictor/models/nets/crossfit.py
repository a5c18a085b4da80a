"""Nets that check each other: each is trained on all but one part, and scores that part."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from services.predictor.models.fitting import Rows, Tick, by_parts
from services.predictor.models.frame import Frame
from services.predictor.models.nets.fused import Fused
from services.predictor.models.nets.losses import Loss
from services.predictor.models.nets.net import Net, Preparation, View, train
from services.predictor.models.spread import Floats


@dataclass(frozen=True)
class Recipe:
    """What to train: what the net reads, how many outputs it has, and its loss."""

    view: View
    loss: Loss
    outputs: int = 1


@dataclass(frozen=True)
class Ensemble:
    """Nets of one preparation; their scores are averaged."""

    preparation: Preparation
    nets: tuple[Net, ...]

    def scores(self, frame: Frame) -> Floats:
        """[n, outputs]."""
        return np.asarray(self._fused.scores(self.preparation.inputs(frame)).numpy(), float)

    @cached_property
    def _fused(self) -> Fused:
        return Fused(self.nets, len(self.preparation.middle))


def crossfit(
    frame: Frame, targets: Floats, recipe: Recipe, seed: int, tick: Tick
) -> tuple[Ensemble, Floats]:
    """The ensemble, and for each row the score [outputs] of the net that has not seen its prompt.

    The same by the seed, but for rounding. O(parts · epochs · rows).
    """
    preparation = Preparation.fit(frame, recipe.view)
    labels = torch.from_numpy(np.asarray(targets, np.float32))

    def fit(rows: Rows) -> Net:
        torch.manual_seed(seed)
        net = Net(preparation, recipe.outputs)
        inputs = preparation.inputs(frame.take(rows))
        train(net, inputs, labels[torch.from_numpy(rows)], _squeezed(recipe), seed)
        return net

    def say(net: Net, rows: Rows) -> Floats:
        return net.scores(preparation.inputs(frame.take(rows)))

    nets, unseen = by_parts(frame, seed, tick, fit, say)
    return Ensemble(preparation, tuple(nets)), unseen


def _squeezed(recipe: Recipe) -> Loss:
    if recipe.outputs > 1:
        return recipe.loss

    def of_column(scores: Tensor, targets: Tensor) -> Tensor:
        return recipe.loss(scores[:, 0], targets)

    return of_column
