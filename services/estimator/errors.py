"""How far off the estimator was, told before it learnt: its own judge."""

from collections import deque

import numpy as np


class Errors:
    """Relative errors of what was told and then measured, over the latest WINDOW of them."""

    WINDOW = 512
    FEWEST = 32  # a tenth of fewer says nothing of a tail

    def __init__(self) -> None:
        self._latest: deque[float] = deque(maxlen=self.WINDOW)

    def add(self, told_s: float, measured_s: float) -> None:
        """`measured_s` must be positive."""
        self._latest.append(abs(told_s - measured_s) / measured_s)

    def __len__(self) -> int:
        return len(self._latest)

    def quantiles(self) -> tuple[float, float] | None:
        """Median and 90th percentile; None while fewer than FEWEST were told. O(WINDOW)."""
        if len(self) < self.FEWEST:
            return None
        median, p90 = np.quantile(np.fromiter(self._latest, float, len(self)), (0.5, 0.9))
        return float(median), float(p90)
