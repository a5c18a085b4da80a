"""Accuracy of estimates made before learning from the measurement."""

from collections import deque

import numpy as np


class Errors:
    """Relative errors of the latest WINDOW estimates."""

    WINDOW = 512
    MIN_SAMPLES = 32  # fewer do not determine the 90th percentile

    def __init__(self) -> None:
        self._latest: deque[float] = deque(maxlen=self.WINDOW)

    def add(self, expected_s: float, measured_s: float) -> None:
        """`measured_s` must be positive."""
        self._latest.append(abs(expected_s - measured_s) / measured_s)

    def __len__(self) -> int:
        return len(self._latest)

    def quantiles(self) -> tuple[float, float] | None:
        """Median and 90th percentile; None with fewer than MIN_SAMPLES. O(WINDOW)."""
        if len(self) < self.MIN_SAMPLES:
            return None
        median, p90 = np.quantile(np.fromiter(self._latest, float, len(self)), (0.5, 0.9))
        return float(median), float(p90)
