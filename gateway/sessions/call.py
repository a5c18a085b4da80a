"""One client's call: the sessions it waits for, chunks of all that has accumulated, and when its
client took them."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from gateway.requests.parser import Generation
from gateway.sessions.delivery import Ended, unsent
from gateway.sessions.placement import Placement
from gateway.sessions.session import ChoiceChunk, Session
from services.core import FinishReason
from services.runtime.errors import Code, ServiceError


@dataclass(slots=True, eq=False)
class Live:
    """A session with what the pipeline needs around it."""

    session: Session
    generation: Generation
    choice: int  # among those of its generation; offsets the seed
    call: "ClientCall"
    prefix_hashes: bytes = b""  # how its prompt begins, as it is submitted
    place: Placement = field(default_factory=Placement)
    ended: Ended | None = None  # once its client has all of it that it will ever have


class Ledger(Protocol):
    """What a call tells of itself to its owner."""

    def pace_s(self) -> float:
        """Between two of its messages."""
        ...

    def release(self, call: "ClientCall") -> None:
        """It is closed: what still runs shall end."""
        ...

    def on_gap(self, gap_s: float, tokens: int) -> None:
        """Its client has so many tokens, so long after those before."""
        ...

    def on_settled(self, live: Live, ended: Ended) -> None:
        """The client has all of a choice that it will ever have. Once a choice."""
        ...


class ClientCall:
    """Merges the chunks of its choices for one writer, in the order in which they had news.

    A choice's first chunk and its last go out at once. Between them the writer is woken no more
    often than every `pace_s()` seconds and takes all that is there, so that many streams cost
    few messages, and a slow client one at a time. `close` ends the call from any side, once.

    Whoever iterates the chunks comes for the next when the client's socket has taken the last: that
    is when its tokens count as delivered. Of an answer that is sent `whole`, nothing is seen to be
    late before its end: its tokens count as they come here, its end when `on_whole_sent` says so,
    and its owner must close it.
    """

    def __init__(
        self,
        request_id: str,
        created_unix_s: int,
        ledger: Ledger,
        whole: bool = False,
        named: str = "",
    ):
        """`request_id` is no other's; `named`: as its client calls it, who may repeat himself."""
        self.request_id = request_id
        self.answer_id = named or request_id
        self.created_unix_s = created_unix_s
        self.whole = whole
        self.lives: list[Live] = []
        self.taken_s = time.monotonic()  # when the client last took something
        self.owner: asyncio.Task[object] | None = None
        self._ledger = ledger
        self._news: dict[int, Session] = {}
        self._urgent = False
        self._next_s = 0.0
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def prompt_tokens(self) -> int:
        """Of each prompt once, however many choices it has."""
        return sum(live.generation.prompt_tokens for live in self.lives if live.choice == 0)

    @property
    def completion_tokens(self) -> int:
        return sum(len(x.session.output) for x in self.lives if not x.generation.scores_only)

    @property
    def cached_tokens(self) -> int:
        """Of the prompts', whose KV was there already."""
        return sum(live.session.cached_tokens for live in self.lives if live.choice == 0)

    @property
    def waits_for_client(self) -> bool:
        """Whether something lies ready that its writer has not come back for."""
        return bool(self._news) and self._waiter is None

    def notify(self, session: Session, now_s: float) -> None:
        """There is news of a session. Cheap: called for each token message."""
        self._news[session.index] = session
        urgent = session.over or not session.started
        self._urgent |= urgent
        if self._waiter is None:
            return  # the writer is busy and looks here when it is done
        if urgent or now_s >= self._next_s:
            self._wake()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._next_s - now_s, self._wake)

    async def chunks(self) -> AsyncGenerator[ChoiceChunk]:
        """Every choice's chunks up to its last. Raises the ServiceError that broke the call."""
        self.owner = asyncio.current_task()
        unfinished = len(self.lives)
        try:
            while unfinished:
                for session in await self._take_news():
                    chunk = session.take(self.taken_s)
                    if chunk is None:
                        continue
                    self._check(session)
                    unfinished -= chunk.reason is not None
                    scored = self.lives[chunk.index].generation.scores_only
                    yield chunk.of_the_prompt if scored else chunk
                    self._on_taken(session, chunk)
        finally:
            if unfinished or not self.whole:
                self.close()

    def on_whole_sent(self) -> None:
        """The client has the whole answer."""
        now_s = time.monotonic()
        for live in self.lives:
            self._settle(live, live.session.reason or FinishReason.ERROR, now_s)

    def close(self) -> None:
        """The client has all it wants: what is still running is cancelled."""
        if not self._closed:
            self._closed = True
            self._drop_timer()
            self._ledger.release(self)
            self._settle_unsent()

    def _on_taken(self, session: Session, chunk: ChoiceChunk) -> None:
        self.taken_s = now_s = time.monotonic()
        if self.whole:
            return
        if chunk.token_ids:
            delivery = session.delivery
            delivery.on_sent(len(chunk.token_ids), now_s)
            if delivery.line.gap_s is not None:
                self._ledger.on_gap(delivery.line.gap_s, len(chunk.token_ids))
        if chunk.reason is not None:
            self._settle(self.lives[session.index], chunk.reason, now_s)

    def _settle_unsent(self) -> None:
        """Of what its client was not given to the end, nothing more will come."""
        now_s = time.monotonic()
        sessions = [live.session for live in self.lives]
        broken = None
        if any(session.reason is FinishReason.DEADLINE for session in sessions):
            broken = FinishReason.DEADLINE
        elif any(session.failure is not None for session in sessions):
            broken = FinishReason.ERROR
        refused = any(session.line.rejected for session in sessions)
        for live in self.lives:
            if live.ended is None:
                live.session.line.rejected = refused  # a call is refused whole
                self._settle(live, unsent(live.session.reason, broken), now_s)

    def _settle(self, live: Live, reason: FinishReason, now_s: float) -> None:
        session = live.session
        if live.ended is None:
            line = session.line if self.whole else session.delivery.of(session.line)
            line.ended_s = now_s
            live.ended = Ended.judged(live.generation.sla, line, reason)
            self._ledger.on_settled(live, live.ended)

    async def _take_news(self) -> Sequence[Session]:
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
        self._next_s = now_s + self._ledger.pace_s()
        return sessions

    def _wake(self) -> None:
        self._drop_timer()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _drop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self, session: Session) -> None:
        if session.failure is not None:
            raise session.failure
        if session.reason is FinishReason.DEADLINE and not self.completion_tokens:
            raise ServiceError(
                Code.DEADLINE_EXCEEDED, "its deadline comes before the first token can"
            )
