"""Sets a prompt model aside for the applications where it is less accurate than history."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from services.runtime.bounded_dict import BoundedDict

WINDOW = 1_000  # last outcomes that are compared
MIN_OUTCOMES = 200  # with fewer, a few long answers decide
BLOCK = 20  # consecutive outcomes: those of a burst are alike and count as one observation
# Of the mean difference, required for a change. The comparison is made at every outcome, and by
# 2 standard errors one of two equally accurate models was set aside about once in 1,000 outcomes.
STD_ERRORS = 4.0
# With a guard of their own, 32 kB each. Clients choose the names; the least recently observed
# application is evicted.
APPLICATIONS = 256

Application = tuple[str, str]  # model and application


class ModelGuard:
    """Compares the model's losses with history's and sets the model aside or reinstates it.

    A change needs a significant difference against the present decision, so that two models of
    about the same accuracy stay as they are. Each change restarts the comparison, so changes are
    at least MIN_OUTCOMES outcomes apart.
    """

    def __init__(self) -> None:
        self.set_aside = False
        self.decides = False  # whether there were MIN_OUTCOMES outcomes
        self._excess: deque[float] = deque(maxlen=WINDOW)

    def observe(self, excess: Sequence[float]) -> bool:
        """Adds the model's losses minus history's, one per outcome. Returns whether the decision
        changed. O(WINDOW)."""
        self._excess.extend(excess)
        count = len(self._excess)
        if count < MIN_OUTCOMES:
            return False
        self.decides = True
        recent = np.fromiter(islice(self._excess, count % BLOCK, None), float)
        means = recent.reshape(-1, BLOCK).mean(axis=1)
        margin = STD_ERRORS * means.std(ddof=1) / np.sqrt(len(means))
        worse = means.mean() * (-1 if self.set_aside else 1)
        if worse <= margin:
            return False
        self.set_aside = not self.set_aside
        self._excess.clear()
        return True


@dataclass(frozen=True, slots=True)
class Decision:
    """A changed decision. `application` is None for the applications with few outcomes."""

    application: Application | None
    set_aside: bool

    @property
    def subject(self) -> str:
        """What it is about, for the log."""
        if self.application is None:
            return "applications with few outcomes"
        model, name = self.application
        return f"application {name!r} of {model}" if name else f"{model} without an application"


class ApplicationGuards:
    """A guard for each application with MIN_OUTCOMES outcomes, and one for all others together.

    An application begins with the decision for the others.
    """

    def __init__(self, applications: int = APPLICATIONS):
        self._own = BoundedDict[Application, ModelGuard](applications)
        self._others = ModelGuard()

    @property
    def count_set_aside(self) -> int:
        """Guards that set the model aside. O(applications)."""
        own = (guard for guard in self._own.values() if guard.decides)
        return sum(guard.set_aside for guard in (self._others, *own))

    def is_set_aside(self, application: Application) -> bool:
        own = self._own.get(application)
        return (own if own and own.decides else self._others).set_aside

    def observe(self, application: Application, excess: Sequence[float]) -> Decision | None:
        """Adds the losses of outcomes of one application; see `ModelGuard.observe`."""
        own = self._own.pop(application, None) or ModelGuard()
        self._own[application] = own  # the newest entry
        if not own.decides:
            own.set_aside = self._others.set_aside
        changed = own.observe(excess)
        if own.decides:
            return Decision(application, own.set_aside) if changed else None
        changed = self._others.observe(excess)
        return Decision(None, self._others.set_aside) if changed else None
