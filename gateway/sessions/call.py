"""One client's call: the sessions it waits for, and chunks of all that has accumulated."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field

from gateway.requests.parser import Generation
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


class ClientCall:
    """Merges the chunks of its choices for one writer, in the order in which they had news.

    A choice's first chunk and its last go out at once. Between them the writer is woken no more
    often than every `pace_s()` seconds and takes all that is there, so that many streams cost
    few messages, and a slow client one at a time. `close` ends the call from any side, once.
    """

    def __init__(
        self,
        request_id: str,
        created_unix_s: int,
        pace_s: Callable[[], float],
        on_close: Callable[["ClientCall"], None],
    ):
        self.request_id = request_id
        self.created_unix_s = created_unix_s
        self.lives: list[Live] = []
        self.taken_s = time.monotonic()  # when the client last took something
        self.owner: asyncio.Task[object] | None = None
        self._pace_s, self._on_close = pace_s, on_close
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
        return sum(len(live.session.output) for live in self.lives)

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
                    chunk = session.take()
                    if chunk is None:
                        continue
                    self._check(session)
                    unfinished -= chunk.reason is not None
                    yield chunk
        finally:
            self.close()

    def close(self) -> None:
        """The client has all it wants: what is still running is cancelled."""
        if not self._closed:
            self._closed = True
            self._drop_timer()
            self._on_close(self)

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
        self._next_s = now_s + self._pace_s()
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
