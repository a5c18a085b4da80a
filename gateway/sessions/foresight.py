"""What a client that asks is told of its choice while it comes: how long it will be, and when it
ends. Pure.

The scheduler tells a distribution and a pace once, and again when they are replaced; what follows
from what was sent since is reckoned here, for each chunk. When its first token comes the scheduler
expects; what its client is promised allows for how far that has been off.
"""

from dataclasses import dataclass
from math import ceil, floor, isfinite

from gateway.sessions.promises import Promises
from services.core import Sla
from services.forecast import Forecast
from services.sla import RequestTimeline

LOW, HIGH = 0.05, 0.95  # quantiles of what is told to be the 90 % interval
PRIOR_TOKENS = 16  # so many gaps of its own say as much of a stream's pace as what was foretold


@dataclass(frozen=True, slots=True)
class Foretold:
    """The scheduler's word on a choice. `token_s` is what a token takes it while it runs, `ttft_s`
    when its first is expected, from arrival. Raises ValueError for times that can't be."""

    forecast: Forecast
    token_s: float
    ttft_s: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("token_s", self.token_s), ("ttft_s", self.ttft_s or 0.0)):
            if not (isfinite(value) and value >= 0):
                raise ValueError(f"foretold {name} must be finite and not negative, not {value}")


@dataclass(frozen=True, slots=True)
class Foreseen:
    """A choice's output tokens in all and the seconds from now to its end: tokens sent ≤ low ≤
    expected ≤ high ≤ max_tokens. `end_s` is what is expected. `ttft_s` is promised at submission:
    about 90 % of first tokens go out by then, counted from arrival. It and whether the SLA is
    expected to hold, by the same promise, are told until something has been sent."""

    expected_tokens: float
    low_tokens: int
    high_tokens: int
    end_s: float
    ttft_s: float | None = None
    sla_expected: bool | None = None


class Foresight:
    """Of one choice, from its submission to its end, however often it is placed."""

    def __init__(self, sla: Sla, max_tokens: int, arrival_s: float, promises: Promises):
        self.opening: Foreseen | None = None  # what was told first, while more was to come
        self.ttft_s: float | None = None  # as promised first
        self.sla_expected: bool | None = None  # of that promise
        self._sla, self._max_tokens, self._arrival_s = sla, max_tokens, arrival_s
        self._promises = promises
        self._expected_s = 0.0  # what the promise was made of
        self._told: Foretold | None = None
        self._first_s = arrival_s  # when the first token is due by now
        self._begun: tuple[float, int] | None = None  # when something was first sent, how much
        self._introduced = False  # the promise was told beside text
        self._ventured = False  # the promise was told before any token had come

    @property
    def is_news(self) -> bool:
        """Whether something is known that has not been told at all."""
        return self._told is not None and self.opening is None

    def hear(self, told: Foretold) -> None:
        """What is foreseen from now on. Of promises the first counts."""
        self._told = Foretold(told.forecast.truncated(self._max_tokens), told.token_s, told.ttft_s)
        if told.ttft_s is None:
            return
        self._first_s = self._arrival_s + told.ttft_s
        if self.ttft_s is None:
            self._expected_s = told.ttft_s
            self.ttft_s = self._promises.of(told.ttft_s)
            pace_holds = told.token_s <= min(self._sla.tpot_s, self._sla.mtpot_s)
            self.sla_expected = self.ttft_s <= self._sla.ttft_s and pace_holds

    def at(self, sent_tokens: int, over: bool, now_s: float) -> Foreseen | None:
        """What to tell beside a chunk with which so many tokens have been sent in all; None while
        nothing is known. To be asked once a chunk, in order. O(64)."""
        pace_s = self._pace_s(sent_tokens, now_s)
        if self._told is None:
            return None
        low, expected, high = self._lengths(self._told.forecast, sent_tokens, over)
        until_first_s = 0.0 if sent_tokens else max(0.0, self._first_s - now_s)
        gaps = max(0.0, expected - max(1, sent_tokens))
        end_s = 0.0 if over else until_first_s + gaps * pace_s
        promise = (None, None) if self._introduced else (self.ttft_s, self.sla_expected)
        self._introduced |= sent_tokens > 0
        self._ventured |= not (sent_tokens or over) and promise[0] is not None
        seen = Foreseen(expected, low, high, end_s, *promise)
        if self.opening is None and not over:
            self.opening = seen
        return seen

    def kept(self, line: RequestTimeline) -> bool | None:
        """Whether the first token went out as was promised, when `line` is all that its client
        will ever have. None where no promise was told before any token had come, or it ended
        without one before then: who says it when it is there has promised nothing."""
        if self.ttft_s is None or not self._ventured:
            return None
        kept = line.ttft_s <= self.ttft_s
        return None if kept and not line.tokens else kept

    def teach(self, line: RequestTimeline) -> None:
        """The promises to come learn what came of this one. Once a choice."""
        if self.ttft_s is not None and self.kept(line) is not None:
            self._promises.learn(self._expected_s, self.ttft_s, line.ttft_s)

    def _lengths(self, forecast: Forecast, sent: int, over: bool) -> tuple[int, float, int]:
        """Low, expected and high, in whole tokens but for the mean: that lies outside the interval
        where little mass lies far out, and is told as its nearer end."""
        if over:
            return sent, float(sent), sent
        low = max(sent, floor(forecast.quantile(LOW, sent)))
        high = max(low, ceil(forecast.quantile(HIGH, sent)))
        expected = sent + forecast.mean_remaining(sent)
        return low, min(max(expected, float(low)), float(high)), high

    def _pace_s(self, sent: int, now_s: float) -> float:
        """Seconds a token: as this stream has had it, beside what was foretold for as many gaps as
        `PRIOR_TOKENS`."""
        if self._begun is None and sent:
            self._begun = (now_s, sent)
        if self._told is None:
            return 0.0
        if self._begun is None:
            return self._told.token_s
        since_s, before = self._begun
        took_s = PRIOR_TOKENS * self._told.token_s + max(0.0, now_s - since_s)
        return took_s / (PRIOR_TOKENS + sent - before)
