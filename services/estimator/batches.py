"""What is learnt from finished batches: Magnus' continuous learning (papers/004 §III-D)."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from services.costs import BatchTiming, CostModel, Neighbours
from services.estimator.errors import Errors
from services.forecast import Floats
from services.policies.estimate import knn

LIMIT = 2**31  # tokens or sequences of a batch; more is nonsense


@dataclass(frozen=True, slots=True)
class Learning:
    """When a batch is learnt from: at a refresh, if it was off by more than `off_s` seconds and
    more than `off_share` of its time. `k` are asked, of the latest `neighbours`."""

    refresh_s: float = 120.0
    off_s: float = 2.0
    off_share: float = 0.2
    k: int = 5
    neighbours: int = Neighbours.MOST


class Batches:
    """Batches served since the last refresh, and those that were learnt from."""

    WAITING = 1_024  # between two refreshes; the oldest goes

    def __init__(self, learning: Learning):
        self._learning = learning
        self._waiting: deque[BatchTiming] = deque(maxlen=self.WAITING)
        self._learnt: deque[BatchTiming] = deque(maxlen=learning.neighbours)
        self._due_s = inf
        self.errors = Errors()
        self.neighbours = Neighbours(k=learning.k)

    def add(self, batch: BatchTiming, now: float) -> bool:
        """Keep it for the next refresh; False for one that says nothing: no work, or no positive
        finite time."""
        work = (batch.seqs, batch.length_tokens, batch.generated_tokens)
        if not all(0 < n < LIMIT for n in work) or not 0 < batch.elapsed_s < inf:
            return False
        self._waiting.append(batch)
        self._due_s = min(self._due_s, now + self._learning.refresh_s)
        return True

    def refresh(self, cost: CostModel, now: float) -> bool:
        """Where it is time, tell all that wait once more, by `cost` as it is served, and learn
        from those that are off; whether `neighbours` have changed.

        O(waiting · neighbours), at most some 30 ms, once a `refresh_s`.
        """
        if now < self._due_s:
            return False
        waiting = list(self._waiting)
        self._waiting.clear()
        self._due_s = inf
        told_s = _told(cost, waiting)
        off = []
        for batch, seconds in zip(waiting, told_s.tolist(), strict=True):
            self.errors.add(seconds, batch.elapsed_s)
            if self._is_off(seconds, batch.elapsed_s):
                off.append(batch)
        if off:
            self._learnt.extend(off)
            self.neighbours = Neighbours.of(self._learnt, self._learning.k)
        return bool(off)

    def _is_off(self, told_s: float, measured_s: float) -> bool:
        off_s = abs(told_s - measured_s)
        return off_s > self._learning.off_s and off_s > self._learning.off_share * measured_s


def _told(cost: CostModel, batches: Sequence[BatchTiming]) -> Floats:
    served = np.array([(b.seqs, b.length_tokens, b.generated_tokens) for b in batches], float)
    return knn(cost, *served.reshape(-1, 3).T)
