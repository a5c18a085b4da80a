"""Trains the ranker over a frozen encoder; held-out prompts stop each net."""

from collections.abc import Callable

import torch
from torch import Tensor

from lab.training.datasets import TrainingSet
from lab.training.early_stopping import BestWeights, TrainingOptions, TrainingReporter
from services.predictor.artefact.tensors import Calibration
from services.predictor.blend.mixture import WINDOW
from services.predictor.models.fitting import PARTS, Rows, cross_fit
from services.predictor.models.nets.crossfit import Ensemble
from services.predictor.models.nets.net import EpochCallback, Inputs, Net, Preparation, train
from services.predictor.models.nets.recipes import RANKER, ScoreModel
from services.predictor.models.scale import Scale
from services.predictor.models.scoring import tau_b
from services.predictor.models.spread import Floats

Trained = tuple[ScoreModel, Calibration]


def fit(
    train_on: TrainingSet,
    held: TrainingSet | None,
    course: TrainingOptions,
    report: TrainingReporter,
) -> Trained:
    """Like `fit_ranker`, but each net keeps its best epoch by tau on `held`, which trains no net.

    Out-of-fold forecasts stay unbiased, because a net's held-out part selects nothing.
    """
    frame, lengths = train_on.frame, train_on.lengths
    preparation = Preparation.fit(frame, RANKER.view)
    labels = torch.from_numpy(lengths).float()
    held_inputs = (preparation.inputs(held.frame), held.lengths) if held else None
    nets_done: list[Net] = []

    def tick(share: float) -> None:
        report.progress("ranker", round(share * PARTS), PARTS)

    def fit_part(rows: Rows) -> Net:
        torch.manual_seed(course.seed)
        net = Net(preparation, RANKER.outputs)
        best = BestWeights(net, course.patience)
        watch = _epoch_callback(net, best, held_inputs, _epoch_reporter(report, len(nets_done)))
        inputs = preparation.inputs(frame.select_rows(rows))
        train(net, inputs, labels[torch.from_numpy(rows)], _loss, course.seed, course.epochs, watch)
        best.restore()
        net.settle(inputs)
        nets_done.append(net)
        return net

    def predict(net: Net, rows: Rows) -> Floats:
        return net.scores(preparation.inputs(frame.select_rows(rows)))

    nets, out_of_fold = cross_fit(frame, course.seed, tick, fit_part, predict)
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


def _loss(scores: Tensor, lengths: Tensor) -> Tensor:
    return RANKER.loss(scores[:, 0], lengths)


def _epoch_callback(
    net: Net,
    best: BestWeights,
    held_inputs: tuple[Inputs, Floats] | None,
    progress: Callable[[int, float], None],
) -> EpochCallback:
    """Evaluates the net on held-out prompts after each epoch; never stops without any."""

    def watch(epoch: int) -> bool:
        if held_inputs is None:
            return False
        net.eval()
        tau = tau_b(net.scores(held_inputs[0])[:, 0], held_inputs[1])
        net.train()
        progress(epoch, tau)
        return best.offer(tau)

    return watch


def _epoch_reporter(report: TrainingReporter, part: int) -> Callable[[int, float], None]:
    def progress(epoch: int, tau: float) -> None:
        line = f"ranker, net {part + 1} of {PARTS}, epoch {epoch + 1}: tau {tau:.3f}"
        report.progress(line, part, PARTS)
        report.note(line)

    return progress
