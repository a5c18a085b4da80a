"""Trains the ranker over a frozen encoder; held-out prompts stop each net."""

from itertools import count

import torch

from lab.training.datasets import TrainingSet
from lab.training.early_stopping import BestWeights, TrainingOptions, TrainingReporter
from services.predictor.artefact.tensors import Calibration
from services.predictor.blend.mixture import WINDOW
from services.predictor.learning.scorecard import tau_b
from services.predictor.models.fitting import PARTS, Rows, cross_fit
from services.predictor.models.nets.crossfit import Ensemble
from services.predictor.models.nets.net import Inputs, Net, train
from services.predictor.models.nets.recipes import RANKER, ScoreModel
from services.predictor.models.preparation import Preparation
from services.predictor.models.scale import Scale
from services.predictor.models.spread import Floats

Trained = tuple[ScoreModel, Calibration]


def fit(
    train_on: TrainingSet,
    held: TrainingSet | None,
    options: TrainingOptions,
    report: TrainingReporter,
) -> Trained:
    """Fits as `fit_ranker` does, and keeps each net's best epoch by tau on `held`.

    No net is trained on `held`. Out-of-fold forecasts stay unbiased, because they select nothing.
    """
    frame, lengths = train_on.frame, train_on.lengths
    preparation = Preparation.fit(frame, RANKER.view)
    labels = torch.from_numpy(lengths).float()
    held_inputs = Inputs.of(preparation.columns(held.frame)) if held else None
    numbers = count(1)

    def tick(share: float) -> None:
        report.progress("ranker", round(share * PARTS), PARTS)

    def fit_part(rows: Rows) -> Net:
        torch.manual_seed(options.seed)
        net, number = Net(preparation, RANKER.outputs), next(numbers)
        best = BestWeights(net, options.patience)

        def evaluate(epoch: int) -> bool:
            if held is None or held_inputs is None:
                return False
            net.eval()
            tau = tau_b(net.scores(held_inputs)[:, 0], held.lengths)
            net.train()
            line = f"ranker, net {number} of {PARTS}, epoch {epoch + 1}: tau {tau:.3f}"
            report.progress(line, number - 1, PARTS)
            report.note(line)
            return best.offer(tau)

        inputs = Inputs.of(preparation.columns(frame.select_rows(rows)))
        targets = labels[torch.from_numpy(rows)]
        train(net, inputs, targets, RANKER.net_loss, options.seed, options.epochs, evaluate)
        best.restore()
        net.settle(inputs)
        return net

    def predict(net: Net, rows: Rows) -> Floats:
        return net.scores(Inputs.of(preparation.columns(frame.select_rows(rows))))

    nets, out_of_fold = cross_fit(frame, options.seed, tick, fit_part, predict)
    return _calibrated(Ensemble(preparation, tuple(nets)), out_of_fold[:, 0], train_on)


def recalibrate(model: ScoreModel, by: TrainingSet) -> Trained:
    """Recalibrates lengths on requests that trained neither the nets nor the encoder."""
    return _calibrated(model.ensemble, model.ensemble.scores(by.frame)[:, 0], by)


def _calibrated(ensemble: Ensemble, out_of_fold: Floats, by: TrainingSet) -> Trained:
    scale = Scale.fit(out_of_fold, by.lengths)
    last = slice(-WINDOW, None)
    return ScoreModel(ensemble, scale), Calibration(
        scale.spread(out_of_fold[last]),
        by.frame.applications[last],
        by.lengths[last],
        len(out_of_fold),
    )
