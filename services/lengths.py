"""The length distribution of the next answer, from the answers that have ended."""

from collections import deque

import numpy as np

from services.core import FinishReason
from services.forecast import UNCAPPED, Forecast, from_masses

WINDOW = 1_000  # Past-Future's w (Gong et al., ASPLOS 2025, §3.2)
# other answers were cut short
LEARNABLE_REASONS = frozenset({FinishReason.STOP, FinishReason.LENGTH})
PRIOR = 1.0


class LengthWindow:
    """The last `window` output lengths of one population, and their forecast.

    **The start.** The paper's window begins with w entries of `max_tokens`, which answers replace
    one by one: safe, but for the first thousand answers the forecast says little else. Here the
    empty part of the window counts as `prior` entries in total, while there is room for them. With
    one, the next answer runs to its request's own `max_tokens` with probability 1 / (n + 1) after n
    answers: the probability that the next of n + 1 exchangeable answers is the longest. It is 1
    before the first answer, a half after it, and 0 with a full window, as in the paper.

    **Answers cut at their `max_tokens`** are known to be longer, not how long. Their share goes to
    the longer ones (Kaplan-Meier), and if nothing longer ended, to each request's own cap.

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
        """Adds an ended answer of at least one token."""
        self._tokens.append(tokens)
        self._cut.append(reason is FinishReason.LENGTH and tokens >= max_tokens)
        self._forecast = None

    def forecast(self, source: str, version: int = 0, shared_key: str = "") -> Forecast:
        """An UNCAPPED forecast, with the source, version and key of the first call since the last
        `add`."""
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
