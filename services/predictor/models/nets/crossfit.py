"""Cross-fitted nets: each is trained on all parts but one and scores that part."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from services.predictor.models.fitting import ProgressCallback, Rows, cross_fit
from services.predictor.models.frame import Frame
from services.predictor.models.nets.fused import Fused
from services.predictor.models.nets.losses import Loss
from services.predictor.models.nets.net import Inputs, Net, train
from services.predictor.models.preparation import FeatureSelection, Preparation
from services.predictor.models.spread import Floats


@dataclass(frozen=True)
class Recipe:
    """Inputs, number of outputs and loss of a net."""

    view: FeatureSelection
    loss: Loss
    outputs: int = 1

    def net_loss(self, scores: Tensor, targets: Tensor) -> Tensor:
        """Loss of a net's scores [n, outputs]; `loss` takes [n] for a single output."""
        return self.loss(scores[:, 0] if self.outputs == 1 else scores, targets)


@dataclass(frozen=True)
class Ensemble:
    """Nets with the same preparation; their scores are averaged."""

    preparation: Preparation
    nets: tuple[Net, ...]

    def scores(self, frame: Frame) -> Floats:
        """[n, outputs]."""
        return np.asarray(
            self._fused.scores(Inputs.of(self.preparation.columns(frame))).numpy(), float
        )

    @cached_property
    def _fused(self) -> Fused:
        return Fused(self.nets, len(self.preparation.middle))


def crossfit(
    frame: Frame, targets: Floats, recipe: Recipe, seed: int, tick: ProgressCallback
) -> tuple[Ensemble, Floats]:
    """Returns the ensemble and out-of-fold scores [n, outputs].

    Deterministic by the seed except for rounding. O(parts · epochs · rows).
    """
    preparation = Preparation.fit(frame, recipe.view)
    labels = torch.from_numpy(np.asarray(targets, np.float32))

    def fit(rows: Rows) -> Net:
        torch.manual_seed(seed)
        net = Net(preparation, recipe.outputs)
        inputs = Inputs.of(preparation.columns(frame.select_rows(rows)))
        train(net, inputs, labels[torch.from_numpy(rows)], recipe.net_loss, seed)
        return net

    def predict(net: Net, rows: Rows) -> Floats:
        return net.scores(Inputs.of(preparation.columns(frame.select_rows(rows))))

    nets, out_of_fold = cross_fit(frame, seed, tick, fit, predict)
    return Ensemble(preparation, tuple(nets)), out_of_fold
