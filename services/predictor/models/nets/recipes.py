"""Predictors that are nets: ranker, proxy and classify."""

from dataclasses import dataclass

import numpy as np

from services.predictor.models.fitting import Fitted, ProgressCallback
from services.predictor.models.frame import Frame
from services.predictor.models.nets.crossfit import Ensemble, Recipe, crossfit
from services.predictor.models.nets.losses import CLASSES, cross_entropy, l1, list_mle
from services.predictor.models.preparation import FeatureSelection
from services.predictor.models.scale import Scale
from services.predictor.models.spread import LEVELS, Floats

RANKER = Recipe(FeatureSelection(), list_mle)
PROXY = Recipe(FeatureSelection(all_layers=False, words=False), l1)
CLASSIFY = Recipe(FeatureSelection(all_layers=False, words=False), cross_entropy, CLASSES)


@dataclass(frozen=True)
class ScoreModel:
    """One score per request and the lengths observed at each score."""

    ensemble: Ensemble
    scale: Scale

    def spread(self, frame: Frame) -> Floats:
        return self.scale.spread(self.ensemble.scores(frame)[:, 0])


def fit_ranker(frame: Frame, lengths: Floats, seed: int, tick: ProgressCallback) -> Fitted:
    """Fits a ranker by ListMLE over encoder states and words (Learning to Rank, Fu et al., NeurIPS
    2024)."""
    return _scaled(*crossfit(frame, lengths, RANKER, seed, tick), lengths)


def fit_proxy(frame: Frame, lengths: Floats, seed: int, tick: ProgressCallback) -> Fitted:
    """Fits a regressor of log length on the sentence embedding by L1. The quantiles come from the
    observed lengths at each score."""
    logs = np.log(np.maximum(lengths, 1))
    ensemble, out_of_fold = crossfit(
        frame, (logs - logs.mean()) / (logs.std() + 1e-6), PROXY, seed, tick
    )
    return _scaled(ensemble, out_of_fold, lengths)


def _scaled(ensemble: Ensemble, out_of_fold: Floats, lengths: Floats) -> Fitted:
    scale = Scale.fit(out_of_fold[:, 0], lengths)
    return Fitted(ScoreModel(ensemble, scale), scale.spread(out_of_fold[:, 0]))


@dataclass(frozen=True)
class ClassModel:
    """The most probable of ten length classes, and the lengths within each."""

    ensemble: Ensemble
    quantiles: Floats  # [classes, 64]

    def spread(self, frame: Frame) -> Floats:
        return self.from_scores(self.ensemble.scores(frame))

    def from_scores(self, scores: Floats) -> Floats:
        return np.asarray(self.quantiles[scores.argmax(axis=1)])


def fit_classify(frame: Frame, lengths: Floats, seed: int, tick: ProgressCallback) -> Fitted:
    """Fits a classifier of ten classes of equal width up to the longest answer (S3, the baseline
    Classification of Learning to Rank, Fu et al., NeurIPS 2024, §5.1 and Table 3). Most answers are
    in the first classes, so it is accurate and orders badly."""
    width = lengths.max() / CLASSES
    classes = np.minimum(lengths // width, CLASSES - 1)
    ensemble, out_of_fold = crossfit(frame, classes, CLASSIFY, seed, tick)
    quantiles = [_within(lengths[classes == c], c * width, width) for c in range(CLASSES)]
    model = ClassModel(ensemble, np.stack(quantiles))
    return Fitted(model, model.from_scores(out_of_fold))


def _within(of_class: Floats, start: float, width: float) -> Floats:
    """Quantiles of the lengths of a class; evenly over its width if it has none."""
    if not len(of_class):
        return np.maximum(start + width * LEVELS, 1)
    return np.asarray(np.quantile(of_class, LEVELS, method="hazen"))
