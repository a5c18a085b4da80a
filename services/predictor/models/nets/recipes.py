"""Predictors that are nets: ranker, proxy and classify."""

from dataclasses import dataclass

import numpy as np

from services.predictor.models.fitting import Fitted, ProgressCallback
from services.predictor.models.frame import Frame
from services.predictor.models.nets.crossfit import Ensemble, Recipe, crossfit
from services.predictor.models.nets.losses import CLASSES, cross_entropy, l1, list_mle
from services.predictor.models.nets.net import FeatureSelection
from services.predictor.models.scale import Scale
from services.predictor.models.spread import Floats, from_samples

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
    """Probabilities of ten length classes and the lengths within each."""

    ensemble: Ensemble
    samples: Floats  # [classes, samples]

    def spread(self, frame: Frame) -> Floats:
        return self.from_scores(self.ensemble.scores(frame))

    def from_scores(self, scores: Floats) -> Floats:
        odds = np.exp(scores - scores.max(axis=1, keepdims=True))
        shares = odds / odds.sum(axis=1, keepdims=True)
        per_class = self.samples.shape[1]
        weights = np.repeat(shares / per_class, per_class, axis=1)
        samples = np.broadcast_to(self.samples.ravel(), weights.shape)
        return from_samples(np.asarray(samples), weights)


def fit_classify(frame: Frame, lengths: Floats, seed: int, tick: ProgressCallback) -> Fitted:
    """Fits a classifier of length deciles (Learning to Rank, Fu et al., NeurIPS 2024, §5.1)."""
    edges = np.quantile(lengths, np.linspace(0, 1, CLASSES + 1)[1:-1])
    classes = np.searchsorted(edges, lengths, side="right")
    ensemble, out_of_fold = crossfit(frame, classes.astype(float), CLASSIFY, seed, tick)
    levels = (np.arange(16) + 0.5) / 16
    samples = [_within(lengths[classes == c], lengths, levels) for c in range(CLASSES)]
    model = ClassModel(ensemble, np.stack(samples))
    return Fitted(model, model.from_scores(out_of_fold))


def _within(of_class: Floats, all_lengths: Floats, levels: Floats) -> Floats:
    return np.asarray(np.quantile(of_class if len(of_class) else all_lengths, levels))
