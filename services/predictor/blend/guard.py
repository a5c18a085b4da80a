"""Sets a prompt model aside while it is less accurate than history."""

from collections import deque
from collections.abc import Sequence

import numpy as np

WINDOW = 1_000  # outcomes in a full comparison
MIN_OUTCOMES = 200  # with fewer, a few long answers decide
SIGNIFICANT_STD_ERRORS = 2.0  # required of the mean difference before the window is full


class ModelGuard:
    """Compares the model's losses with history's and sets the model aside or reinstates it.

    A full window decides by any difference, a shorter one only by a significant one. Each change
    restarts the comparison, so changes are at least MIN_OUTCOMES outcomes apart.
    """

    def __init__(self) -> None:
        self.set_aside = False
        self._excess: deque[float] = deque(maxlen=WINDOW)

    def observe(self, excess: Sequence[float]) -> bool:
        """Adds the model's losses minus history's, one per outcome. Returns whether the decision
        changed."""
        self._excess.extend(excess)
        if len(self._excess) < MIN_OUTCOMES:
            return False
        differences = np.array(self._excess)
        error = differences.std() / np.sqrt(len(differences))
        margin = 0.0 if len(differences) == WINDOW else SIGNIFICANT_STD_ERRORS * error
        worse = differences.mean() * (-1 if self.set_aside else 1)
        if worse <= margin:
            return False
        self.set_aside = not self.set_aside
        self._excess.clear()
        return True
