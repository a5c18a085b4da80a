"""Learns from finished batches, as Magnus' continuous learning does (Cheng et al., ICWS 2024,
§III-D)."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from services.costs import MAX_S, BatchTiming, CostModel, Neighbours
from services.estimator.windows import ErrorWindow
from services.forecast import Floats
from services.policies.estimate import knn

MAX_TOKENS = 2**31  # tokens or sequences of a plausible batch


@dataclass(frozen=True, slots=True)
class BatchLearning:
    """When to learn from a batch: at a refresh, if the error of its estimate exceeds `off_s`
    seconds and `off_share` of its time. An estimate uses `k` of the latest `neighbours` learned
    batches."""

    refresh_s: float = 120.0
    off_s: float = 2.0
    off_share: float = 0.2
    k: int = 5
    neighbours: int = Neighbours.MOST


class BatchMemory:
    """Batches since the last refresh, and the batches learned from."""

    WAITING = 1_024  # between two refreshes; the oldest is dropped

    def __init__(self, learning: BatchLearning):
        self._learning = learning
        self._waiting: deque[BatchTiming] = deque(maxlen=self.WAITING)
        self._learned: deque[BatchTiming] = deque(maxlen=learning.neighbours)
        self._due_s = inf
        self.errors = ErrorWindow()
        self.neighbours = Neighbours(k=learning.k)

    def add(self, batch: BatchTiming, now: float) -> bool:
        """Stores a batch for the next refresh; returns False for one without work or a
        plausible time."""
        work = (batch.seqs, batch.length_tokens, batch.generated_tokens)
        if not all(0 < n < MAX_TOKENS for n in work) or not 0 < batch.elapsed_s <= MAX_S:
            return False
        self._waiting.append(batch)
        self._due_s = min(self._due_s, now + self._learning.refresh_s)
        return True

    def refresh(self, cost: CostModel, now: float) -> bool:
        """When due, estimates all waiting batches with `cost` and learns from inaccurate estimates.
        Returns whether `neighbours` changed.

        O(waiting · neighbours), at most 30 ms per `refresh_s`.
        """
        if now < self._due_s:
            return False
        waiting = list(self._waiting)
        self._waiting.clear()
        self._due_s = inf
        expected_s = _expected_s(cost, waiting)
        inaccurate = []
        for batch, seconds in zip(waiting, expected_s.tolist(), strict=True):
            self.errors.add(seconds, batch.elapsed_s)
            if self._is_inaccurate(seconds, batch.elapsed_s):
                inaccurate.append(batch)
        if inaccurate:
            self._learned.extend(inaccurate)
            self.neighbours = Neighbours.fit(self._learned, self._learning.k)
        return bool(inaccurate)

    def _is_inaccurate(self, expected_s: float, measured_s: float) -> bool:
        off_s = abs(expected_s - measured_s)
        return off_s > self._learning.off_s and off_s > self._learning.off_share * measured_s


def _expected_s(cost: CostModel, batches: Sequence[BatchTiming]) -> Floats:
    served = np.array([(b.seqs, b.length_tokens, b.generated_tokens) for b in batches], float)
    return knn(cost, *served.reshape(-1, 3).T)
