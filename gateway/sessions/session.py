"""One live choice: what its client has been sent, what comes next, and when it is over. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Protocol

from gateway.requests.incremental import Detokenizer, StopMatcher
from gateway.sessions.delivery import Delivery
from gateway.sessions.foresight import Foreseen, Foresight
from services.core import FinishReason
from services.sla import RequestTimeline

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


class Logprob(Protocol):
    """A token's log-probability and its likeliest rivals, as the worker sends it."""

    @property
    def token_id(self) -> int: ...
    @property
    def logprob(self) -> float: ...
    @property
    def top_ids(self) -> Sequence[int]: ...
    @property
    def top_logprobs(self) -> Sequence[float]: ...


class News(Enum):
    """What fed tokens meant."""

    NONE = auto()  # nothing the client has not got
    TOKENS = auto()
    GAP = auto()  # tokens before these were lost: resubmit
    END = auto()


@dataclass(frozen=True, slots=True)
class ChoiceChunk:
    """What has become sendable of one choice since its last chunk."""

    index: int
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[Logprob]
    reason: FinishReason | None = None
    forecast: Foreseen | None = None  # where its client asks, and it is known
    prompt_logprobs: Sequence[Logprob] = ()  # with its first tokens, where asked for

    @property
    def of_the_prompt(self) -> "ChoiceChunk":
        """The same without what was drawn."""
        reason = self.reason and (LENGTH if self.reason is STOP else self.reason)
        return replace(self, text="", token_ids=(), logprobs=(), reason=reason)


class Session:
    """The state of one choice from its arrival to its end.

    Tokens are taken by offset: repeats change nothing and a gap is reported, never bridged, so
    that any number of placements of the request makes one answer. `output` is what a new
    placement continues from; it never passes `max_tokens`, which bounds what waits for a client.
    """

    def __init__(
        self,
        index: int,
        max_tokens: int,
        arrival_s: float,
        detokenizer: Detokenizer,
        stops: Sequence[str] = (),
        min_tokens: int = 0,
        foresight: Foresight | None = None,
        include_stops: bool = False,
    ):
        """`foresight`: where its client asks what is foreseen of it; `include_stops`: the stop
        string that ends it is part of its text."""
        self.index = index
        self.output: list[int] = []
        self.line = RequestTimeline(arrival_s)  # of its tokens as they came
        self.delivery = Delivery(arrival_s)
        self.foresight = foresight
        self.reason: FinishReason | None = None
        self.failure: Exception | None = None
        self.stopped_by_text = False
        self.cached_tokens = 0  # of its prompt, whose KV was there already
        self.prompt_logprobs: Sequence[Logprob] = ()  # where asked for, with its first token
        self._max_tokens = max_tokens
        self._min_tokens = min_tokens
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops, include_stops) if stops else None
        self._text: list[str] = []
        self._logprobs: list[Logprob] = []
        self._taken_tokens = 0
        self._decoded_tokens = 0  # where no stop string is looked for
        self._end_taken = False

    @property
    def over(self) -> bool:
        return self.reason is not None

    @property
    def full(self) -> bool:
        """Whether every token it may have is there."""
        return len(self.output) >= self._max_tokens

    @property
    def started(self) -> bool:
        """Whether the client has been given anything."""
        return self._taken_tokens > 0

    def learn(self, cached_tokens: int, prompt_logprobs: Sequence[Logprob]) -> None:
        """What came with its first tokens of its prompt."""
        self.cached_tokens = max(self.cached_tokens, cached_tokens)
        self.prompt_logprobs = prompt_logprobs or self.prompt_logprobs

    def feed(
        self,
        offset: int,
        token_ids: Sequence[int],
        logprobs: Sequence[Logprob],
        reason: FinishReason | None,
        now_s: float,
    ) -> News:
        """Take tokens `[offset, offset + len)` of the answer and, with a reason, its end."""
        have = len(self.output)
        if self.over:
            return News.NONE
        if offset > have:
            return News.GAP
        repeated = have - offset
        fresh = token_ids[repeated : repeated + self._max_tokens - have]
        if fresh:
            if self.line.away and have:
                self.delivery.on_back(have, max(0.0, now_s - self.line.swap_in_since_s))
            self._accept(fresh, logprobs[repeated : repeated + len(fresh)])
            self.line.on_tokens(len(self.output) - have, now_s)
        stale = repeated > len(token_ids) and reason is not FinishReason.ERROR
        if reason is not None and not self.over and not stale:
            self.end(reason, now_s)
        if self.over:
            self.line.ended_s = now_s
            return News.END
        return News.TOKENS if fresh else News.NONE

    def end(self, reason: FinishReason, now_s: float, failure: Exception | None = None) -> None:
        """The answer is complete as it stands; with a failure, it is broken."""
        if self.over:
            return
        self.reason, self.failure = reason, failure
        self.line.ended_s = now_s
        if failure is None and not self.stopped_by_text:
            self._flush_text()

    def take(self, now_s: float = 0.0) -> ChoiceChunk | None:
        """All that is sendable, once; None while nothing has become text, and after the end. What
        is foreseen as of `now_s` goes beside it, and the first time, before any token, alone."""
        if self._matcher is None and not self.over:
            self._add_text(self._detokenize())
        sight = self.foresight
        alone = sight is not None and sight.is_news and not self.output
        if self._end_taken or not (self._text or self.over or alone):
            return None
        self._end_taken = self.over
        chunk = ChoiceChunk(
            self.index,
            "".join(self._text),
            self.output[self._taken_tokens :],
            self._logprobs,
            self.reason,
            sight.at(len(self.output), self.over, now_s) if sight else None,
            () if self._taken_tokens else self.prompt_logprobs,
        )
        self._taken_tokens = len(self.output)
        self._text, self._logprobs = [], []
        return chunk

    def _accept(self, fresh: Sequence[int], logprobs: Sequence[Logprob]) -> None:
        if self._matcher is None:  # decoded when taken: once for all that has accumulated
            self.output += fresh
            self._logprobs += logprobs
            return
        for at, token in enumerate(fresh):  # one by one: the stop's token ends the answer
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
            self._add_text(text)
            return False
        safe, found = self._matcher.feed(text)
        self._add_text(safe)
        return found

    def _flush_text(self) -> None:
        stopped = self.reason is STOP
        if self._matcher is None:
            self._add_text(self._detokenize() + self._detokenizer.flush(stopped))
            return
        rest = self._detokenizer.flush(stopped)
        safe, self.stopped_by_text = self._matcher.feed(rest)
        self._add_text(safe + self._matcher.flush())
        if self.stopped_by_text:
            self.reason = STOP

    def _detokenize(self) -> str:
        fresh = self.output[self._decoded_tokens :]
        self._decoded_tokens = len(self.output)
        return self._detokenizer.feed(fresh) if fresh else ""

    def _add_text(self, text: str) -> None:
        if text:
            self._text.append(text)
