"""Which member to believe: weights by pinball loss, and recalibration, an application each.

The blend's quantiles are weighted geometric means of the members'. Weights descend the blend's own
pinball loss, multiplicatively (exponentiated gradient: Kivinen, Warmuth 1997). Weighing the members
by their log-losses, each for itself, was measured worse: it cannot see that two err together.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from cachetools import LRUCache

from services.predictor.models.spread import LEVELS, Floats, average, levels_of, recalibrated

WINDOW = 1_000  # outcomes an application, from which levels are calibrated
_CALIBRATION_PRIOR = 30  # outcomes' worth of belief in the levels as they are
_APPLICATIONS = 1_024  # names come from clients; the one unseen for longest goes first
_OWN = 100  # unseen outcomes from which an application starts with weights of its own
_ROUNDS, _RATE = 60, 6.0  # of the descent at a start
_ONLINE_RATE = 0.05  # an outcome
_LARGEST_STEP = 2.0
_FLOOR = 1e-3  # a member never quite forgotten can come back


@dataclass
class _Belief:
    """What holds for one application, or for all together."""

    weights: Floats
    levels: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    map: Floats = field(default_factory=lambda: LEVELS)

    def step(self, logs: Floats, true: Floats, rate: float) -> None:
        """Against the gradient of the pinball loss at these outcomes; O(n · 64 · members)."""
        slope = rate * _gradient(logs, true, self.weights)
        moved = self.weights * np.exp(-np.clip(slope, -_LARGEST_STEP, _LARGEST_STEP))
        floored = np.maximum(moved / moved.sum(), _FLOOR)
        self.weights = floored / floored.sum()

    def calibrate(self, levels: Floats, prior: Floats) -> None:
        self.levels.extend(levels.tolist())
        believed = np.repeat(prior, -(-_CALIBRATION_PRIOR // len(prior)))
        self.map = np.quantile(np.concatenate([np.array(self.levels), believed]), LEVELS)


class Mixture:
    """Members' weights and a map of levels for each application, and for those unknown.

    Built from spreads that members gave unseen, and what came true; `observe` goes on from there
    with spreads given before the outcome.
    """

    def __init__(self, members: int):
        self._all = _Belief(np.full(members, 1 / max(members, 1)))
        self._own: LRUCache[str, _Belief] = LRUCache(_APPLICATIONS)

    def start(
        self, spreads: Sequence[Floats], applications: Sequence[str], lengths: Floats
    ) -> None:
        """Descends to the weights of all together, from there to each application's own."""
        logs, true, names = _logs(spreads), np.log(lengths), np.array(applications)
        _descend(self._all, logs, true)
        for name, count in zip(*np.unique(names, return_counts=True), strict=True):
            if count >= _OWN:
                belief = self._belief(str(name))
                _descend(belief, logs[names == name], true[names == name])
        self._calibrate(spreads, applications, lengths)

    def observe(
        self, spreads: Sequence[Floats], applications: Sequence[str], lengths: Floats
    ) -> None:
        """A step for each application met. O(n · 64 · members + applications · window)."""
        self._calibrate(spreads, applications, lengths)
        logs, true, names = _logs(spreads), np.log(lengths), np.array(applications)
        self._all.step(logs, true, _ONLINE_RATE * len(true))
        for name in np.unique(names):
            rows = names == name
            self._belief(str(name)).step(logs[rows], true[rows], _ONLINE_RATE * rows.sum())

    def combine(self, spreads: Sequence[Floats], applications: Sequence[str]) -> Floats:
        """Members' spreads [n, 64] each → the believed one, recalibrated."""
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
        levels = levels_of(average(spreads, np.stack([b.weights for b in beliefs])), lengths)
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
    """Of the mean pinball loss in tokens, per mean token, by the weights; sums to about 0.

    logs: [n, 64, members]; true: log lengths [n].
    """
    blended = logs @ weights
    tokens = np.exp(blended)
    sides = np.where(true[:, None] >= blended, -LEVELS, 1 - LEVELS) * tokens / tokens.mean()
    slope = np.einsum("nq,nqm->m", sides, logs) / blended.size
    return np.asarray(slope - slope.mean())
