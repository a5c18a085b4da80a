"""Weights of the members and recalibration per application.

The blend's quantiles are weighted geometric means of the members' quantiles. The weights descend
the pinball loss of the blend by exponentiated gradient (Kivinen and Warmuth, Information and
Computation 1997). Weights from each member's own log-loss were measured worse: they ignore
correlated errors.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from cachetools import LRUCache

from services.predictor.models.spread import LEVELS, Floats, average, quantile_levels, recalibrated

WINDOW = 1_000  # outcomes per application for calibration
_CALIBRATION_PRIOR = 30  # pseudo-outcomes for the uncalibrated levels
_APPLICATIONS = 1_024  # clients choose the names; least recently used is evicted
_MIN_OUTCOMES = 100  # out-of-fold, required for weights per application
_ROUNDS, _RATE = 60, 6.0  # descent in `start`
_ONLINE_RATE = 0.05  # per outcome
_MAX_STEP = 2.0
_MIN_WEIGHT = 1e-3  # so that a member can recover


@dataclass
class _Belief:
    """Weights and calibration of one application, or of all together."""

    weights: Floats
    levels: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    map: Floats = field(default_factory=lambda: LEVELS)

    def step(self, logs: Floats, true: Floats, rate: float) -> None:
        """One step against the gradient of the pinball loss; O(n · 64 · members)."""
        slope = rate * _gradient(logs, true, self.weights)
        moved = self.weights * np.exp(-np.clip(slope, -_MAX_STEP, _MAX_STEP))
        floored = np.maximum(moved / moved.sum(), _MIN_WEIGHT)
        self.weights = floored / floored.sum()

    def calibrate(self, levels: Floats, prior: Floats) -> None:
        self.levels.extend(levels.tolist())
        believed = np.repeat(prior, -(-_CALIBRATION_PRIOR // len(prior)))
        self.map = np.quantile(np.concatenate([np.array(self.levels), believed]), LEVELS)


class Mixture:
    """Weights of the members and a calibration map for each application, with defaults for unknown
    ones.

    `start` uses out-of-fold forecasts; `observe` continues with forecasts made before the outcome.
    """

    def __init__(self, members: int):
        self._all = _Belief(np.full(members, 1 / max(members, 1)))
        self._own: LRUCache[str, _Belief] = LRUCache(_APPLICATIONS)

    def start(
        self, spreads: Sequence[Floats], applications: Sequence[str], lengths: Floats
    ) -> None:
        """Fits the weights of all applications together, then each application's own from there."""
        logs, true, names = _logs(spreads), np.log(lengths), np.array(applications)
        _descend(self._all, logs, true)
        for name, count in zip(*np.unique(names, return_counts=True), strict=True):
            if count >= _MIN_OUTCOMES:
                belief = self._belief(str(name))
                _descend(belief, logs[names == name], true[names == name])
        self._calibrate(spreads, applications, lengths)

    def observe(
        self, spreads: Sequence[Floats], applications: Sequence[str], lengths: Floats
    ) -> None:
        """One step per application. O(n · 64 · members + applications · window)."""
        self._calibrate(spreads, applications, lengths)
        logs, true, names = _logs(spreads), np.log(lengths), np.array(applications)
        self._all.step(logs, true, _ONLINE_RATE * len(true))
        for name in np.unique(names):
            rows = names == name
            self._belief(str(name)).step(logs[rows], true[rows], _ONLINE_RATE * rows.sum())

    def combine(self, spreads: Sequence[Floats], applications: Sequence[str]) -> Floats:
        """Returns the weighted and recalibrated quantiles [n, 64] of the members' quantiles [n, 64]
        each."""
        beliefs = [self._own.get(name, self._all) for name in applications]
        mixed = average(spreads, np.stack([b.weights for b in beliefs]))
        return recalibrated(mixed, np.stack([b.map for b in beliefs]))

    def weights(self, application: str) -> Floats:
        return self._own.get(application, self._all).weights

    def _calibrate(
        self, spreads: Sequence[Floats], applications: Sequence[str], lengths: Floats
    ) -> None:
        names = np.array(applications)
        beliefs = [self._own.get(name, self._all) for name in applications]
        levels = quantile_levels(average(spreads, np.stack([b.weights for b in beliefs])), lengths)
        self._all.calibrate(levels, LEVELS)
        for name in np.unique(names):
            self._belief(str(name)).calibrate(levels[names == name], self._all.map)

    def _belief(self, name: str) -> _Belief:
        if name not in self._own:
            self._own[name] = _Belief(self._all.weights, map=self._all.map)
        return self._own[name]


def _logs(spreads: Sequence[Floats]) -> Floats:
    return np.log(np.stack(spreads, axis=2))


def _descend(belief: _Belief, logs: Floats, true: Floats) -> None:
    for number in range(_ROUNDS):
        belief.step(logs, true, _RATE / np.sqrt(1 + number / 5))


def _gradient(logs: Floats, true: Floats, weights: Floats) -> Floats:
    """Gradient by weight of the mean pinball loss in tokens, per mean token; its mean is 0.

    logs: [n, 64, members]; true: log lengths [n].
    """
    blended = logs @ weights
    tokens = np.exp(blended)
    sides = np.where(true[:, None] >= blended, -LEVELS, 1 - LEVELS) * tokens / tokens.mean()
    slope = np.einsum("nq,nqm->m", sides, logs) / blended.size
    return np.asarray(slope - slope.mean())
