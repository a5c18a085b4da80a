"""One client's call: the choices it waits for, and the chunks that one writer sends."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from gateway.admission.key_limits import Grant
from gateway.sessions.client_timeline import find_undelivered_reason
from gateway.sessions.session import ChoiceChunk, Session
from gateway.sessions.submission import Submission
from gateway.types.generation import GenerationRequest
from gateway.types.outcome import ChoiceOutcome
from services.core import FinishReason
from services.runtime.errors import Code, ServiceError


@dataclass(slots=True, eq=False)
class LiveChoice:
    """A session with its request, its call and its current submission."""

    session: Session
    request: GenerationRequest
    choice: int  # index within its request; offsets the seed
    call: "ClientCall"
    prefix_hashes: bytes = b""  # of the prompt, for placement
    submission: Submission = field(default_factory=Submission)
    outcome: ChoiceOutcome | None = None  # once its delivery is complete


class CallOwner(Protocol):
    """Receives the events of a call."""

    def message_interval_s(self) -> float:
        """Seconds until the next message of a call that sends one now. Once per message."""
        ...

    def release(self, call: "ClientCall", now_s: float) -> None:
        """The call is closed: ends what still runs."""
        ...

    def on_gap(self, gap_s: float, tokens: int) -> None:
        """The client received `tokens` tokens, `gap_s` after the previous ones."""
        ...

    def on_delivered(self, live: LiveChoice, outcome: ChoiceOutcome) -> None:
        """The delivery of a choice is complete. Once per choice."""
        ...


class ChunkSink(Protocol):
    """A client's connection to which chunks may be written without its writer."""

    @property
    def ready(self) -> bool:
        """Whether `write` may be called now: it cannot wait for the client."""
        ...

    def write(self, chunk: ChoiceChunk) -> None: ...


class ClientCall:
    """Merges the chunks of its choices for one writer, in the order in which they had news.

    The first and the last chunk of a choice are sent at once. In between, the writer wakes at most
    every `message_interval_s()` and sends everything accumulated, so that many streams cost few
    messages, and a slow client one at a time. `close` ends the call from any side, once.

    A writer that iterates the chunks requests the next one when the client's socket has accepted
    the last; only then its tokens count as delivered. With a `sink`, a writer that waits for news
    is woken only for what the sink cannot take: the first and last chunks, failures, and everything
    while the client does not read. For an answer sent `whole`, tokens count when
    they arrive here and its end when `on_whole_sent` is called; its owner must close it.
    """

    def __init__(
        self,
        request_id: str,
        created_unix_s: int,
        owner: CallOwner,
        whole: bool = False,
        client_id: str = "",
    ):
        """`request_id` is unique; `client_id` is the client's name for the request, not unique."""
        self.request_id = request_id
        self.answer_id = client_id or request_id
        self.created_unix_s = created_unix_s
        self.whole = whole
        self.choices: list[LiveChoice] = []
        self.taken_s = time.monotonic()  # when the client last accepted something
        self.writer: asyncio.Task[object] | None = None
        self.sink: ChunkSink | None = None
        self.grant: Grant | None = None  # of its API key's limits
        self.on_closed: Callable[[ClientCall], None] | None = None
        self._owner = owner
        self._news: dict[int, Session] = {}
        self._urgent = False
        self._next_s = 0.0
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._closed = False
        self._broken: Exception | None = None  # the sink failed

    @property
    def model_name(self) -> str:
        """The name of the adapter or model that answers."""
        client = self.choices[0].request.client
        return client.adapter or client.model

    @property
    def prompt_tokens(self) -> int:
        """Each prompt counts once, whatever its number of choices."""
        return sum(live.request.prompt_tokens for live in self.choices if live.choice == 0)

    @property
    def completion_tokens(self) -> int:
        return sum(
            len(live.session.output) for live in self.choices if not live.request.client.scores_only
        )

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that had their KV in the prefix cache."""
        return sum(live.session.cached_tokens for live in self.choices if live.choice == 0)

    @property
    def _used_tokens(self) -> int:
        """Prompt and answer; 0 if the scheduler refused the call."""
        answer = self.completion_tokens
        rejected = not answer and any(live.session.timeline.rejected for live in self.choices)
        return 0 if rejected else self.prompt_tokens + answer

    @property
    def account(self) -> Mapping[str, object]:
        """What a closed call has used, and how its choices ended."""
        outcomes = [live.outcome for live in self.choices if live.outcome]
        rejected = any(outcome.timeline.rejected for outcome in outcomes)
        return {
            "id": self.request_id,
            "model": self.model_name,
            "sla_class": self.choices[0].request.sla.name,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "completion_tokens": self.completion_tokens,
            "outcomes": ["rejected"]
            if rejected
            else [each.reason.name.lower() for each in outcomes],
        }

    @property
    def waits_for_client(self) -> bool:
        """Whether news is ready that the writer has not requested."""
        return bool(self._news) and self._waiter is None

    def limit(self, deadline_s: float, end: Callable[["ClientCall", float], None]) -> None:
        """Runs `end` at the deadline unless the call is closed before."""

        def on_deadline() -> None:
            self._deadline = None
            end(self, time.monotonic())

        left_s = max(0.0, deadline_s - time.monotonic())
        self._deadline = asyncio.get_running_loop().call_later(left_s, on_deadline)

    def notify(self, session: Session, now_s: float) -> None:
        """A session has news. Called for each token message: O(1)."""
        self._news[session.index] = session
        urgent = session.over or not session.started
        self._urgent |= urgent
        if self._waiter is None:
            return  # the writer is sending and checks for news afterwards
        if urgent or now_s >= self._next_s:
            self._wake(now_s)
        elif self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._next_s - now_s, self._wake)

    async def chunks(self) -> AsyncGenerator[ChoiceChunk]:
        """Every choice's chunks up to its last. Raises the ServiceError that broke the call."""
        self.writer = asyncio.current_task()
        unfinished = len(self.choices)
        try:
            while unfinished:
                for session in await self._wait_for_news():
                    if self._broken is not None:
                        raise self._broken
                    chunk = session.pop_chunk(self.taken_s)
                    if chunk is None:
                        continue
                    self._raise_failure(session)
                    unfinished -= chunk.reason is not None
                    scores_only = self.choices[chunk.index].request.client.scores_only
                    yield chunk.without_output if scores_only else chunk
                    self._on_sent(session, chunk)
        finally:
            if unfinished or not self.whole:
                self.close()

    def on_whole_sent(self) -> None:
        """The client has received the whole answer."""
        now_s = time.monotonic()
        for live in self.choices:
            self._complete(live, live.session.reason or FinishReason.ERROR, now_s)

    def close(self) -> None:
        """The client needs nothing more: cancels what still runs."""
        if not self._closed:
            self._closed = True
            self._drop_timer()
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None
            self._owner.release(self, time.monotonic())
            self._complete_undelivered()
            if self.grant is not None:
                self.grant.settle(self._used_tokens, time.monotonic())
            if self.on_closed is not None:
                self.on_closed(self)

    def forget(self) -> None:
        """Drops what refers to this call, so that all of it is freed at once and not in a pause of
        the garbage collector. The last call of its owner, after its chunks are read."""
        for live in self.choices:
            live.session.failure = None  # its traceback refers to this call once it was raised
        self._broken = None
        self.choices, self.sink, self.writer = [], None, None

    def _on_sent(self, session: Session, chunk: ChoiceChunk, now_s: float | None = None) -> None:
        self.taken_s = now_s = time.monotonic() if now_s is None else now_s
        if self.whole:
            return
        if chunk.token_ids:
            delivered = session.client_timeline
            delivered.on_sent(len(chunk.token_ids), now_s)
            if delivered.timeline.gap_s is not None:
                self._owner.on_gap(delivered.timeline.gap_s, len(chunk.token_ids))
        if chunk.reason is not None:
            self._complete(self.choices[session.index], chunk.reason, now_s)

    def _complete_undelivered(self) -> None:
        """Completes choices without a delivered end."""
        now_s = time.monotonic()
        sessions = [live.session for live in self.choices]
        broken = None
        if any(session.reason is FinishReason.DEADLINE for session in sessions):
            broken = FinishReason.DEADLINE
        elif any(session.failure is not None for session in sessions):
            broken = FinishReason.ERROR
        rejected = any(session.timeline.rejected for session in sessions)
        for live in self.choices:
            if live.outcome is None:
                live.session.timeline.rejected = rejected  # a call is rejected as a whole
                reason = find_undelivered_reason(live.session.reason, broken)
                self._complete(live, reason, now_s)

    def _complete(self, live: LiveChoice, reason: FinishReason, now_s: float) -> None:
        if live.outcome is not None:
            return
        session = live.session
        timeline = (
            session.timeline if self.whole else session.client_timeline.complete(session.timeline)
        )
        timeline.ended_s = now_s
        live.outcome = ChoiceOutcome.judged(live.request.sla, timeline, reason)
        self._owner.on_delivered(live, live.outcome)

    async def _wait_for_news(self) -> Sequence[Session]:
        self.taken_s = now_s = time.monotonic()
        while not self._news or not (self._urgent or now_s >= self._next_s):
            self._waiter = asyncio.get_running_loop().create_future()
            if self._news and self._timer is None:
                delay_s = self._next_s - now_s
                self._timer = asyncio.get_running_loop().call_later(delay_s, self._wake)
            try:
                await self._waiter
            finally:
                self._waiter = None
            self.taken_s = now_s = time.monotonic()
        sessions = list(self._news.values())
        self._news.clear()
        self._urgent = False
        self._next_s = now_s + self._owner.message_interval_s()
        return sessions

    def _wake(self, now_s: float | None = None) -> None:
        self._drop_timer()
        if self._waiter is None or self._waiter.done():
            return
        now_s = time.monotonic() if now_s is None else now_s
        if self.sink is None or not self._write_news(self.sink, now_s):
            self._waiter.set_result(None)

    def _write_news(self, sink: ChunkSink, now_s: float) -> bool:
        """Writes chunks to the sink; False if news is left that only the writer can send."""
        for session in list(self._news.values()):
            if session.over or not (session.started and sink.ready):
                return False
            del self._news[session.index]
            try:
                chunk = session.pop_chunk(now_s)
                if chunk is not None:
                    sink.write(chunk)
                    self._on_sent(session, chunk, now_s)
            except Exception as error:  # the writer reports it; other calls go on
                self._broken = error
                self._news[session.index] = session
                self._urgent = True
                return False
        self._urgent = False
        self._next_s = now_s + self._owner.message_interval_s()
        return True

    def _drop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _raise_failure(self, session: Session) -> None:
        if session.failure is not None:
            raise session.failure
        if session.reason is FinishReason.DEADLINE and not self.completion_tokens:
            raise ServiceError(
                Code.DEADLINE_EXCEEDED, "the deadline passes before the first token is available"
            )
