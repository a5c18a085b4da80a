"""The queue of a burst of requests; evicted requests return to its front."""

import numpy as np

from services.forecast import Ints
from services.policies.snapshot import RequestColumns


class Queue:
    """Waiting rows of `jobs` in order: evicted ones, the latest evicted first, then those that
    never ran, by row."""

    def __init__(self, jobs: RequestColumns):
        self._jobs = jobs
        self._evicted: list[int] = []  # the next one last
        self._fresh = 0  # the first row that never ran

    def __len__(self) -> int:
        return len(self._evicted) + len(self._jobs) - self._fresh

    def head(self, tokens: float) -> Ints:
        """The first rows with a context of at most `tokens` in total, and one more."""
        rows: list[int] = []
        while tokens >= 0 and len(rows) < len(self):
            row = self._row_at(len(rows))
            tokens -= int(self._jobs.prompt[row] + self._jobs.output[row])
            rows.append(row)
        return np.array(rows, np.int64)

    def pop(self, count: int) -> Ints:
        """Takes the first `count` rows."""
        rows = [self._row_at(place) for place in range(count)]
        evicted = min(count, len(self._evicted))
        del self._evicted[len(self._evicted) - evicted :]
        self._fresh += count - evicted
        return np.array(rows, np.int64)

    def put_back(self, row: int) -> None:
        self._evicted.append(row)

    def _row_at(self, place: int) -> int:
        evicted = len(self._evicted)
        return self._evicted[-1 - place] if place < evicted else self._fresh + place - evicted
