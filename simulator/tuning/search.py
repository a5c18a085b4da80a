"""A bounded search for the numbers with the highest score. Pure: the score is a callable.

Half of the trials cover the ranges evenly (a Latin hypercube, so that each number takes as many
values as there are trials). The others are drawn around the best setting so far, in rounds, in a
box that halves after each. Trials of a round do not depend on one another and may run in parallel.
The number of trials in a round does not depend on the machine, so that equal seeds give equal
trials.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from simulator.tuning.ranges import Range

Setting = Mapping[str, float]
Score = Callable[[Sequence[Setting]], Sequence[float]]
"""(settings) → a score for each; more is better, -inf is no result"""

ROUNDS = 4  # around the best setting
FIRST_RADIUS = 0.25  # of a range: half the side of the box in the first round
CHANGED = 0.5  # the chance that a trial near the best changes a number; at least one is changed
SIDE_VALUES = (0.0, 0.5, 1.0)  # shares of a range that the sensitivity tries


@dataclass(frozen=True, slots=True)
class Trial:
    setting: Setting
    score: float


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """The trials of one number at values of its range, with the others as in the `center`."""

    key: str
    trials: tuple[Trial, ...]
    center: Trial

    @property
    def change(self) -> float:
        """The difference between the best and the worst score."""
        scores = [trial.score for trial in (*self.trials, self.center)]
        return max(scores) - min(scores) if min(scores) > -inf else inf


@dataclass(frozen=True, slots=True)
class Found:
    """The start, the best of all trials, all trials in order, and the sensitivity to each number
    around the best setting of the search."""

    start: Trial
    best: Trial
    trials: tuple[Trial, ...]
    sensitivities: tuple[Sensitivity, ...]


def search(
    start: Setting, ranges: Mapping[str, Range], score: Score, trials: int, seed: int
) -> Found:
    """Tries `trials` settings and the start, and then each number at SIDE_VALUES. The start may lie
    outside the ranges. Of equal scores the earlier trial wins, so that the start stays unless
    something is better. At most 1 + trials + len(SIDE_VALUES) · len(ranges) scores."""
    rng = np.random.default_rng(seed)
    covering = _cover(ranges, (trials + 1) // 2, rng)
    tried = _try([start, *covering], score)
    radius = FIRST_RADIUS
    for count in _divide(trials - len(covering), ROUNDS):
        best = _best(tried).setting
        near = [_near(best, ranges, radius, rng) for _ in range(count)]
        tried += _try(near, score)
        radius /= 2
    center = _best(tried)
    sides = [
        (key, {**center.setting, key: range_.at(share)})
        for key, range_ in ranges.items()
        for share in SIDE_VALUES
    ]
    side_trials = _try([setting for _, setting in sides], score)
    by_key = list(zip((key for key, _ in sides), side_trials, strict=True))
    sensitivities = tuple(
        Sensitivity(key, tuple(trial for each, trial in by_key if each == key), center)
        for key in ranges
    )
    tried += side_trials
    return Found(tried[0], _best(tried), tuple(tried), sensitivities)


def _cover(ranges: Mapping[str, Range], count: int, rng: np.random.Generator) -> list[Setting]:
    """A Latin hypercube: each number has one value in each of `count` equal parts of its range."""
    parts = rng.permuted(np.tile(np.arange(count), (len(ranges), 1)), axis=1).T
    shares = (parts + rng.random(parts.shape)) / max(count, 1)
    return [
        {key: range_.at(share) for (key, range_), share in zip(ranges.items(), row, strict=True)}
        for row in shares.tolist()
    ]


def _near(
    center: Setting, ranges: Mapping[str, Range], radius: float, rng: np.random.Generator
) -> Setting:
    """A setting in the box of this radius around the center; a number that is not changed keeps the
    center's value, even outside its range."""
    changes = rng.random(len(ranges)) < CHANGED
    changes[rng.integers(len(ranges))] = True
    steps = rng.uniform(-radius, radius, len(ranges))
    return {
        key: range_.at(min(max(range_.share_of(center[key]) + step, 0.0), 1.0))
        if change
        else center[key]
        for (key, range_), change, step in zip(
            ranges.items(), changes.tolist(), steps.tolist(), strict=True
        )
    }


def _divide(total: int, parts: int) -> list[int]:
    """Splits a number into at most `parts` whole ones that differ by at most 1."""
    sizes = [total // parts + (part < total % parts) for part in range(parts)]
    return [size for size in sizes if size]


def _try(settings: Sequence[Setting], score: Score) -> list[Trial]:
    return [Trial(*tried) for tried in zip(settings, score(settings), strict=True)]


def _best(trials: Sequence[Trial]) -> Trial:
    return max(trials, key=lambda trial: trial.score)  # the first of equal ones
