"""The project's ranker over a frozen encoder, each net stopped by held-out prompts."""

from collections.abc import Callable

import torch
from torch import Tensor

from lab.training.datasets import Lessons
from lab.training.early_stopping import BestWeights, Course, Report
from services.predictor.artefact.tensors import Calibration
from services.predictor.blend.mixture import WINDOW
from services.predictor.models.fitting import PARTS, Rows, by_parts
from services.predictor.models.nets.crossfit import Ensemble
from services.predictor.models.nets.net import Inputs, Net, Preparation, Watch, train
from services.predictor.models.nets.recipes import RANKER, Scored
from services.predictor.models.scale import Scale
from services.predictor.models.scoring import tau_b
from services.predictor.models.spread import Floats

Trained = tuple[Scored, Calibration]


def fit(train_on: Lessons, held: Lessons | None, course: Course, report: Report) -> Trained:
    """As `fit_ranker`, but each net keeps its best epoch by tau on `held`, whose prompts none
    is trained on. What is said unseen stays honest: a net's own left-out part chooses nothing.
    """
    frame, lengths = train_on.frame, train_on.lengths
    preparation = Preparation.fit(frame, RANKER.view)
    labels = torch.from_numpy(lengths).float()
    tried = (preparation.inputs(held.frame), held.lengths) if held else None
    made: list[Net] = []

    def tick(share: float) -> None:
        report.tell("ranker", round(share * PARTS), PARTS)

    def fit_part(rows: Rows) -> Net:
        torch.manual_seed(course.seed)
        net = Net(preparation, RANKER.outputs)
        best = BestWeights(net, course.patience)
        watch = _watching(net, best, tried, _teller(report, len(made)))
        inputs = preparation.inputs(frame.take(rows))
        train(net, inputs, labels[torch.from_numpy(rows)], _loss, course.seed, course.epochs, watch)
        best.restore()
        net.settle(inputs)
        made.append(net)
        return net

    def say(net: Net, rows: Rows) -> Floats:
        return net.scores(preparation.inputs(frame.take(rows)))

    nets, unseen = by_parts(frame, course.seed, tick, fit_part, say)
    return _calibrated(Ensemble(preparation, tuple(nets)), unseen[:, 0], train_on)


def calibrate_anew(model: Scored, by: Lessons) -> Trained:
    """The model with its lengths taken from requests that neither nets nor encoder were trained
    on."""
    return _calibrated(model.ensemble, model.ensemble.scores(by.frame)[:, 0], by)


def _calibrated(ensemble: Ensemble, unseen: Floats, by: Lessons) -> Trained:
    scale = Scale.fit(unseen, by.lengths)
    last = slice(-WINDOW, None)
    return Scored(ensemble, scale), Calibration(
        scale.spread(unseen[last]), by.frame.applications[last], by.lengths[last], len(unseen)
    )


def _loss(scores: Tensor, lengths: Tensor) -> Tensor:
    return RANKER.loss(scores[:, 0], lengths)


def _watching(
    net: Net,
    best: BestWeights,
    tried: tuple[Inputs, Floats] | None,
    tell: Callable[[int, float], None],
) -> Watch:
    """Tries the net on held-out prompts and their lengths; without any nothing stops it."""

    def watch(epoch: int) -> bool:
        if tried is None:
            return False
        net.eval()
        tau = tau_b(net.scores(tried[0])[:, 0], tried[1])
        net.train()
        tell(epoch, tau)
        return best.offer(tau)

    return watch


def _teller(report: Report, part: int) -> Callable[[int, float], None]:
    def tell(epoch: int, tau: float) -> None:
        said = f"ranker, net {part + 1} of {PARTS}, epoch {epoch + 1}: tau {tau:.3f}"
        report.tell(said, part, PARTS)
        report.note(said)

    return tell
