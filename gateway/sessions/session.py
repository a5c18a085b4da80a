"""One live choice: its output, the text to send next, and its end. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from math import inf
from typing import Protocol

from gateway.requests.incremental import AnswerDetokenizer, StopMatcher
from gateway.sessions.client_timeline import ClientTimeline
from gateway.sessions.forecast_tracker import ForecastTracker
from gateway.sessions.reasoning_budget import ReasoningBudget
from gateway.types.forecasts import ClientForecast
from gateway.types.generation import Sampling
from services.core import FinishReason
from services.sla import RequestTimeline

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


class Logprob(Protocol):
    """A token's log-probability and its most likely alternatives, as the worker sends them."""

    @property
    def token_id(self) -> int: ...
    @property
    def logprob(self) -> float: ...
    @property
    def top_ids(self) -> Sequence[int]: ...
    @property
    def top_logprobs(self) -> Sequence[float]: ...


class FeedResult(Enum):
    """The effect of fed tokens."""

    NONE = auto()  # all were known
    TOKENS = auto()
    GAP = auto()  # earlier tokens were lost: resubmit
    CUT = auto()  # the reasoning was ended in place of later tokens: resubmit
    END = auto()


@dataclass(slots=True)  # not frozen: one for each event, and freezing makes it slow
class ChoiceChunk:
    """What has become sendable of one choice since its last chunk. Not changed once made."""

    index: int
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[Logprob]
    reason: FinishReason | None = None
    forecast: ClientForecast | None = None  # if requested and known
    prompt_logprobs: Sequence[Logprob] = ()  # with the first tokens, if requested

    @property
    def without_output(self) -> "ChoiceChunk":
        """The same chunk without generated tokens, for requests that only score the prompt."""
        reason = self.reason and (LENGTH if self.reason is STOP else self.reason)
        return replace(self, text="", token_ids=(), logprobs=(), reason=reason)


class Session:
    """The state of one choice from its arrival to its end.

    Tokens are accepted by offset: repeats have no effect, and a gap is reported, never bridged. Any
    number of placements of the request therefore produces one answer. `output` is what a new
    placement continues from. It never exceeds `max_tokens`, which bounds what waits for a client.
    """

    def __init__(
        self,
        index: int,
        sampling: Sampling,
        arrival_s: float,
        detokenizer: AnswerDetokenizer,
        forecast_tracker: ForecastTracker | None = None,
        budget: ReasoningBudget | None = None,
    ):
        """`forecast_tracker`: given if the client requests forecasts. `budget`: of reasoning."""
        self.index = index
        self.output: list[int] = []
        self.timeline = RequestTimeline(arrival_s)  # of tokens as they arrive from the worker
        self.client_timeline = ClientTimeline(arrival_s)
        self.forecast_tracker = forecast_tracker
        self.reason: FinishReason | None = None
        self.failure: Exception | None = None
        self.stopped_by_text = False
        self.content_s = inf  # the client's first content, of an answer with reasoning or calls
        self.cached_tokens = 0  # prompt tokens with KV in the prefix cache
        self.prompt_logprobs: Sequence[Logprob] = ()
        self._max_tokens, self._min_tokens = sampling.max_tokens, sampling.min_tokens
        self._detokenizer = detokenizer
        self._budget = budget
        self._matcher: StopMatcher | None = None
        if sampling.stop:
            self._matcher = StopMatcher(sampling.stop, sampling.include_stop_str_in_output)
        self._text: list[str] = []
        self._logprobs: list[Logprob] = []
        self._sent_tokens = 0  # in chunks so far
        self._decoded_tokens = 0  # only without stop strings
        self._end_sent = False

    @property
    def over(self) -> bool:
        return self.reason is not None

    @property
    def full(self) -> bool:
        """Whether the output has `max_tokens`."""
        return len(self.output) >= self._max_tokens

    @property
    def started(self) -> bool:
        """Whether a chunk had tokens."""
        return self._sent_tokens > 0

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the output."""
        return self._matcher.found if self._matcher and self.stopped_by_text else None

    def add_prompt_info(self, cached_tokens: int, prompt_logprobs: Sequence[Logprob]) -> None:
        """What the worker reports of the prompt with the first tokens."""
        self.cached_tokens = max(self.cached_tokens, cached_tokens)
        self.prompt_logprobs = prompt_logprobs or self.prompt_logprobs

    def feed(
        self,
        offset: int,
        token_ids: Sequence[int],
        logprobs: Sequence[Logprob],
        reason: FinishReason | None,
        now_s: float,
    ) -> FeedResult:
        """Accepts tokens `[offset, offset + len)` of the output and, with a reason, its end."""
        have = len(self.output)
        if self.over:
            return FeedResult.NONE
        if offset > have:
            return FeedResult.GAP
        repeated = have - offset
        new = token_ids[repeated : repeated + self._max_tokens - have]
        if new and self._budget is not None:
            cut = self._budget.cut(new)
            if cut is not None:
                return self._cut_reasoning(cut, now_s)
            self._budget = None if self._budget.over else self._budget
        if new:
            if self.timeline.away and have:
                swap_in_s = max(0.0, now_s - self.timeline.swap_in_since_s)
                self.client_timeline.on_resumed(have, swap_in_s)
            self._accept(new, logprobs[repeated : repeated + len(new)])
            self.timeline.on_tokens(len(self.output) - have, now_s)
        stale = repeated > len(token_ids) and reason is not FinishReason.ERROR
        if reason is not None and not self.over and not stale:
            self.end(reason, now_s)
        if self.over:
            self.timeline.ended_s = now_s
            return FeedResult.END
        return FeedResult.TOKENS if new else FeedResult.NONE

    def _cut_reasoning(self, tokens: Sequence[int], now_s: float) -> FeedResult:
        """Goes on with these tokens, of which the last ones end the reasoning. They have no
        logprobs."""
        self._budget = None
        have = len(self.output)
        self._accept(tokens[: self._max_tokens - have], ())
        self.timeline.on_tokens(len(self.output) - have, now_s)
        return FeedResult.END if self.over else FeedResult.CUT

    def end(self, reason: FinishReason, now_s: float, failure: Exception | None = None) -> None:
        """The output is complete as it is; with a failure, it is broken."""
        if self.over:
            return
        self.reason, self.failure = reason, failure
        self.timeline.ended_s = now_s
        if failure is None and not self.stopped_by_text:
            self._flush_text()

    def pop_chunk(self, now_s: float = 0.0) -> ChoiceChunk | None:
        """Everything sendable, once; None without new text, and after the end.

        The chunk has the forecast as of `now_s`. The first forecast makes a chunk of its own before
        any token.
        """
        if self._matcher is None and not self.over:
            self._append_text(self._detokenize())
        tracker = self.forecast_tracker
        only_forecast = tracker is not None and tracker.is_news and not self.output
        if self._end_sent or not (self._text or self.over or only_forecast):
            return None
        self._end_sent = self.over
        chunk = ChoiceChunk(
            self.index,
            "".join(self._text),
            self.output[self._sent_tokens :],
            self._logprobs,
            self.reason,
            tracker.next_chunk(len(self.output), self.over, now_s) if tracker else None,
            () if self._sent_tokens else self.prompt_logprobs,
        )
        self._sent_tokens = len(self.output)
        self._text, self._logprobs = [], []
        return chunk

    def _accept(self, new: Sequence[int], logprobs: Sequence[Logprob]) -> None:
        if self._matcher is None:  # pop_chunk decodes all accumulated tokens at once
            self.output += new
            self._logprobs += logprobs
            return
        for at, token in enumerate(new):  # one by one: the token with the stop ends the answer
            self.output.append(token)
            self._logprobs += logprobs[at : at + 1]
            if self._found_stop(self._detokenizer.feed((token,))):
                self.stopped_by_text = True
                self.reason = STOP
                return

    def _found_stop(self, text: str) -> bool:
        if self._matcher is None or not text:
            return False
        if len(self.output) <= self._min_tokens:
            self._append_text(text)
            return False
        safe, found = self._matcher.feed(text)
        self._append_text(safe)
        return found

    def _flush_text(self) -> None:
        stopped = self.reason is STOP
        if self._matcher is None:
            self._append_text(self._detokenize() + self._detokenizer.flush(stopped))
            return
        rest = self._detokenizer.flush(stopped)
        safe, self.stopped_by_text = self._matcher.feed(rest)
        self._append_text(safe + self._matcher.flush())
        if self.stopped_by_text:
            self.reason = STOP

    def _detokenize(self) -> str:
        new = self.output[self._decoded_tokens :]
        self._decoded_tokens = len(self.output)
        return self._detokenizer.feed(new) if new else ""

    def _append_text(self, text: str) -> None:
        if text:
            self._text.append(text)
