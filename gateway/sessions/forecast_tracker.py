"""Forecasts of one choice for its client: its length and its end. Pure.

The scheduler sends a length distribution and a pace once, and again when they are replaced. This
module derives the forecast for each chunk from them and from what was sent since. The scheduler's
time to the first token is an expectation; the promise to the client includes a margin for how far
past expectations were off.
"""

from math import ceil, floor

from gateway.sessions.ttft_promises import TtftPromises
from gateway.types.forecasts import ClientForecast, SchedulerForecast
from services.core import Sla
from services.forecast import Forecast
from services.sla import RequestTimeline

LOW, HIGH = 0.05, 0.95  # quantiles that bound the 90 % interval
PRIOR_TOKENS = 16  # weight of the forecast pace against a stream's own, in tokens


class ForecastTracker:
    """The forecasts of one choice, from its first submission to its end."""

    def __init__(self, sla: Sla, max_tokens: int, arrival_s: float, promises: TtftPromises):
        self.opening: ClientForecast | None = None  # the first forecast sent before the end
        self.ttft_s: float | None = None  # the first promise
        self.sla_expected: bool | None = None  # by that promise
        self._sla, self._max_tokens, self._arrival_s = sla, max_tokens, arrival_s
        self._promises = promises
        self._expected_s = 0.0  # the expectation behind the promise
        self._forecast: SchedulerForecast | None = None
        self._first_token_s = arrival_s  # when the first token is expected now
        self._first_sent: tuple[float, int] | None = None  # time and tokens of the first send
        self._sent_with_text = False  # the promise was sent together with text
        self._sent_before_text = False  # the promise was sent before any token

    @property
    def is_news(self) -> bool:
        """Whether a forecast exists of which the client has received none."""
        return self._forecast is not None and self.opening is None

    def update(self, forecast: SchedulerForecast) -> None:
        """Replaces the forecast. The first promise stays."""
        truncated = forecast.forecast.truncated(self._max_tokens)
        self._forecast = SchedulerForecast(truncated, forecast.token_s, forecast.ttft_s)
        if forecast.ttft_s is None:
            return
        self._first_token_s = self._arrival_s + forecast.ttft_s
        if self.ttft_s is None:
            self._expected_s = forecast.ttft_s
            self.ttft_s = self._promises.promise(forecast.ttft_s)
            pace_holds = forecast.token_s <= min(self._sla.tpot_s, self._sla.mtpot_s)
            self.sla_expected = self.ttft_s <= self._sla.ttft_s and pace_holds

    def next_chunk(self, sent_tokens: int, over: bool, now_s: float) -> ClientForecast | None:
        """The forecast to send with a chunk that brings the tokens sent to `sent_tokens`. None
        without a forecast. Call once per chunk, in order. O(64)."""
        pace_s = self._pace_s(sent_tokens, now_s)
        if self._forecast is None:
            return None
        low, expected, high = self._lengths(self._forecast.forecast, sent_tokens, over)
        until_first_s = 0.0 if sent_tokens else max(0.0, self._first_token_s - now_s)
        gaps = max(0.0, expected - max(1, sent_tokens))
        end_s = 0.0 if over else until_first_s + gaps * pace_s
        promise = (None, None) if self._sent_with_text else (self.ttft_s, self.sla_expected)
        self._sent_with_text |= sent_tokens > 0
        self._sent_before_text |= not (sent_tokens or over) and promise[0] is not None
        forecast = ClientForecast(expected, low, high, end_s, *promise)
        if self.opening is None and not over:
            self.opening = forecast
        return forecast

    def is_promise_kept(self, delivered: RequestTimeline) -> bool | None:
        """Whether the first token was sent as promised; `delivered` is the complete timeline.

        None if no promise was sent before the first token, or if the choice ended without a token
        before the promised time.
        """
        if self.ttft_s is None or not self._sent_before_text:
            return None
        kept = delivered.ttft_s <= self.ttft_s
        return None if kept and not delivered.tokens else kept

    def record_answer(self, delivered: RequestTimeline) -> None:
        """Calibrates later promises with the outcome of this one. Call once per choice."""
        if self.ttft_s is not None and self.is_promise_kept(delivered) is not None:
            self._promises.learn(self._expected_s, self.ttft_s, delivered.ttft_s)

    def _lengths(self, forecast: Forecast, sent: int, over: bool) -> tuple[int, float, int]:
        """Low, expected and high. A mean outside the interval, because little mass lies far out, is
        replaced by the nearer bound."""
        if over:
            return sent, float(sent), sent
        low = max(sent, floor(forecast.quantile(LOW, sent)))
        high = max(low, ceil(forecast.quantile(HIGH, sent)))
        expected = sent + forecast.mean_remaining(sent)
        return low, min(max(expected, float(low)), float(high)), high

    def _pace_s(self, sent: int, now_s: float) -> float:
        """Seconds per token: the stream's own pace, blended with PRIOR_TOKENS gaps of the forecast
        pace."""
        if self._first_sent is None and sent:
            self._first_sent = (now_s, sent)
        if self._forecast is None:
            return 0.0
        if self._first_sent is None:
            return self._forecast.token_s
        since_s, before = self._first_sent
        took_s = PRIOR_TOKENS * self._forecast.token_s + max(0.0, now_s - since_s)
        return took_s / (PRIOR_TOKENS + sent - before)
