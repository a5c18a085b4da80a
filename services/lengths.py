"""What the answers that have ended tell of the length of the next one."""

from collections import deque

import numpy as np

from services.core import FinishReason
from services.forecast import UNCAPPED, Forecast, from_masses

WINDOW = 1_000  # Past-Future's w (papers/000 §3.2)
LEARNABLE_REASONS = frozenset({FinishReason.STOP, FinishReason.LENGTH})  # the others were cut short
PRIOR = 1.0


class LengthWindow:
    """The last `window` output lengths of one population, and the forecast that they make.

    **The start.** The paper's window begins with w entries of `max_tokens`, which answers replace
    one by one: safe, but for the first thousand answers a forecast that says nothing else. Here
    the empty part of the window counts as `prior` entries in all, for as long as there is room for
    them. With one, the next answer runs to its request's own `max_tokens` with probability
    1 / (n + 1) after n answers, which is how likely the next of n + 1 that come in any order is to
    be the longest: certain before there is any, a half after the first, and gone with a full
    window, as in the paper.

    **Answers cut at their `max_tokens`** are known to be longer, not how long. Their share goes to
    the longer ones (Kaplan-Meier), and where nothing longer ended, to each request's own cap.

    A forecast costs O(window · log window) once after each new outcome, O(1) until the next.
    """

    def __init__(self, window: int = WINDOW, prior: float = PRIOR):
        self._tokens: deque[int] = deque(maxlen=window)
        self._cut: deque[bool] = deque(maxlen=window)
        self._window, self._prior = window, prior
        self._forecast: Forecast | None = None

    def __len__(self) -> int:
        return len(self._tokens)

    def add(self, tokens: int, reason: FinishReason, max_tokens: int) -> None:
        """An answer that has ended, of one token at least."""
        self._tokens.append(tokens)
        self._cut.append(reason is FinishReason.LENGTH and tokens >= max_tokens)
        self._forecast = None

    def forecast(self, source: str, version: int = 0, shared_key: str = "") -> Forecast:
        """UNCAPPED. Of the source, version and key first asked for since the last `add`."""
        if self._forecast is None:
            empty = Forecast((float(UNCAPPED),), (1.0,), UNCAPPED, source, version, shared_key)
            self._forecast = self._estimate(empty) if self._tokens else empty
        return self._forecast

    def _estimate(self, empty: Forecast) -> Forecast:
        values, place = np.unique(np.array(self._tokens), return_inverse=True)
        all_ = np.bincount(place)
        ended = np.bincount(place, ~np.array(self._cut))
        unseen = min(self._prior, self._window - len(self))
        at_risk = len(self) + unseen - np.cumsum(all_) + all_
        survive = np.cumprod(1 - ended / at_risk)
        masses = np.append(1.0, survive[:-1]) * ended / at_risk
        return from_masses(
            values[masses > 0].astype(float), masses[masses > 0], float(survive[-1]), empty
        )
