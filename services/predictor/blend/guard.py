"""Sets a prompt model aside while it is less accurate than history."""

from collections import deque
from collections.abc import Sequence
from itertools import islice

import numpy as np

WINDOW = 1_000  # last outcomes that are compared
MIN_OUTCOMES = 200  # with fewer, a few long answers decide
BLOCK = 20  # consecutive outcomes: those of a burst are alike and count as one observation
# Of the mean difference, required for a change. The comparison is made at every outcome, and by
# 2 standard errors one of two equally accurate models was set aside about once in 1,000 outcomes.
STD_ERRORS = 4.0


class ModelGuard:
    """Compares the model's losses with history's and sets the model aside or reinstates it.

    A change needs a significant difference against the present decision, so that two models of
    about the same accuracy stay as they are. Each change restarts the comparison, so changes are
    at least MIN_OUTCOMES outcomes apart.
    """

    def __init__(self) -> None:
        self.set_aside = False
        self._excess: deque[float] = deque(maxlen=WINDOW)

    def observe(self, excess: Sequence[float]) -> bool:
        """Adds the model's losses minus history's, one per outcome. Returns whether the decision
        changed. O(WINDOW)."""
        self._excess.extend(excess)
        count = len(self._excess)
        if count < MIN_OUTCOMES:
            return False
        recent = np.fromiter(islice(self._excess, count % BLOCK, None), float)
        means = recent.reshape(-1, BLOCK).mean(axis=1)
        margin = STD_ERRORS * means.std(ddof=1) / np.sqrt(len(means))
        worse = means.mean() * (-1 if self.set_aside else 1)
        if worse <= margin:
            return False
        self.set_aside = not self.set_aside
        self._excess.clear()
        return True
