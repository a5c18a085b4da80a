"""The length distribution of the next answer, from recent answers: ended ones and live ones."""

from collections import deque
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from services.core import FinishReason, Outcome
from services.forecast import UNCAPPED, Forecast, Ints, from_masses

WINDOW = 1_000  # Past-Future's w (Gong et al., ASPLOS 2025, §3.2)
# other answers were cut short
LEARNABLE_REASONS = frozenset({FinishReason.STOP, FinishReason.LENGTH})
PRIOR = 1.0
SNAPSHOTS = 20  # of the live answers, over one window
NO_ANSWERS = np.zeros(0, np.int64)


class Ended(Protocol):
    """A request that has ended."""

    @property
    def reason(self) -> FinishReason: ...

    @property
    def output_tokens(self) -> int: ...


def is_learnable(ended: Ended) -> bool:
    """Whether the request generated tokens and was not cut short."""
    return ended.reason in LEARNABLE_REASONS and ended.output_tokens > 0


class LengthWindow:
    """The last `window` output lengths of one population, its live answers, and the forecast.

    **The start.** The paper's window begins with w entries of `max_tokens`, which answers replace
    one by one: safe, but for the first thousand answers the forecast says little else. Here the
    empty part of the window counts as `prior` entries in total, while there is room for them. With
    one, the next answer runs to its request's own `max_tokens` with probability 1 / (n + 1) after n
    answers: the probability that the next of n + 1 exchangeable answers is the longest. It is 1
    before the first answer, a half after it, and 0 with a full window, as in the paper.

    **Answers cut at their `max_tokens`** are known to be longer, not how long. Their share goes to
    the longer ones (Kaplan-Meier), and if nothing longer ended, to each request's own cap.

    **Live answers** are cut at their present length. Without them the forecast is biased whenever
    the scheduler prefers short answers: only short ones have ended, so that every running request
    seems to be nearly complete. At each length, only the increase in live answers since the window
    began counts, so that a stationary load has nearly the forecast of its ended answers.

    A forecast costs O((window + live) · log) once after each change, O(1) until the next.
    """

    def __init__(self, window: int = WINDOW, prior: float = PRIOR):
        self._tokens: deque[int] = deque(maxlen=window)
        self._cut: deque[bool] = deque(maxlen=window)
        self._window, self._prior = window, prior
        self._forecast: Forecast | None = None
        self._added = 0
        self._live = NO_ANSWERS
        self._snapshots: deque[tuple[int, Ints]] = deque()  # answers added before, live answers

    def __len__(self) -> int:
        return len(self._tokens)

    def add(self, tokens: int, reason: FinishReason, max_tokens: int) -> None:
        """Adds an ended answer of at least one token."""
        self._tokens.append(tokens)
        self._cut.append(reason is FinishReason.LENGTH and tokens >= max_tokens)
        self._added += 1
        self._forecast = None

    def learn(self, outcome: Outcome) -> None:
        """Adds the answer of an ended request, unless it was cut short or is empty."""
        if is_learnable(outcome):
            self.add(outcome.output_tokens, outcome.reason, outcome.max_tokens)

    def observe_live(self, tokens: Sequence[int]) -> bool:
        """Replaces the live answers by these, which have generated so many tokens and have not
        ended. Returns whether the forecast may change."""
        changes = len(tokens) > 0 or len(self._live) > 0
        self._live = np.sort(np.asarray(tokens, np.int64))
        snapshots = self._snapshots
        if not snapshots or self._added - snapshots[-1][0] > self._window // SNAPSHOTS:
            snapshots.append((self._added, self._live))
        while len(snapshots) > 1 and snapshots[1][0] <= self._added - len(self):
            snapshots.popleft()
        if changes:
            self._forecast = None
        return changes

    def forecast(self, source: str, version: int = 0, shared_key: str = "") -> Forecast:
        """An UNCAPPED forecast, with the source, version and key of the first call since the last
        change."""
        if self._forecast is None:
            empty = Forecast((float(UNCAPPED),), (1.0,), UNCAPPED, source, version, shared_key)
            self._forecast = self._estimate(empty) if self._tokens else empty
        return self._forecast

    def _estimate(self, empty: Forecast) -> Forecast:
        values, place = np.unique(np.array(self._tokens), return_inverse=True)
        all_ = np.bincount(place)
        ended = np.bincount(place, ~np.array(self._cut))
        unseen = min(self._prior, self._window - len(self))
        at_risk = len(self) - np.cumsum(all_) + all_ + self._count_live(values) + unseen
        survive = np.cumprod(1 - ended / at_risk)
        masses = np.append(1.0, survive[:-1]) * ended / at_risk
        return from_masses(
            values[masses > 0].astype(float), masses[masses > 0], float(survive[-1]), empty
        )

    def _count_live(self, lengths: Ints) -> Ints:
        """For each length, by how many more live answers have reached it than when the window
        began; at least 0."""
        counts = len(self._live) - np.searchsorted(self._live, lengths)
        begin = self._added - len(self)
        if begin > 0 and self._snapshots:
            before = self._snapshots[0][1]
            counts -= len(before) - np.searchsorted(before, lengths)
        return np.maximum(counts, 0)
