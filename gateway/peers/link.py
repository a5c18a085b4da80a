"""A stream to a peer that is reopened with backoff. Its queue is bounded."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Generic, TypeVar

from grpc import aio

from services.runtime.errors import InvalidArgument
from services.runtime.network.backoff import Backoff
from services.runtime.network.streams import Outbox, ResponseStream

log = logging.getLogger(__name__)

Up = TypeVar("Up")
Down = TypeVar("Down")


Dial = Callable[[Outbox[Up]], ResponseStream[Down]]


class Link(Generic[Up, Down]):
    """One stream that is reopened whenever it breaks, while `run` runs.

    `on_open` returns the first messages of each stream. Messages queued before are dropped; the
    owner repeats in `on_open` what still matters. `on_lost` is called at the end of each stream.
    """

    def __init__(
        self,
        name: str,
        dial: Dial[Up, Down],
        on_open: Callable[[], Iterable[Up]],
        on_message: Callable[[Down], None],
        on_lost: Callable[[], None],
        backoff: Backoff,
        limit: int,
        on_invalid: Callable[[str], None],
        close: Callable[[], Awaitable[None]] | None = None,
    ):
        """`on_invalid` gets the field of an invalid message, which ends the stream. `close`
        releases what `dial` has made; it is called at the end of each stream."""
        self.name = name
        self._lost_since_s: float | None = time.monotonic()  # None once a message arrived
        self._on_invalid, self._close = on_invalid, close
        self._dial, self._on_open = dial, on_open
        self._on_message, self._on_lost = on_message, on_lost
        self._backoff, self._limit = backoff, limit
        self._outbox: Outbox[Up] | None = None
        self._cut = asyncio.Event()

    def lost_s(self, now_s: float) -> float:
        """Seconds since the stream broke; 0 while connected."""
        return 0.0 if self._lost_since_s is None else now_s - self._lost_since_s

    def send(self, message: Up) -> bool:
        """Queues a message; False without an open stream. A peer with a queue that overflows
        counts as lost."""
        if self._outbox is None:
            return False
        self._outbox.put(message)
        if not self._outbox.overflowed:
            return True
        log.warning("the queue to %s is full; reopening the stream", self.name)
        self.reopen()
        return False

    def reopen(self) -> None:
        """Ends the stream; `run` opens the next one."""
        self._outbox = None
        self._cut.set()

    async def run(self) -> None:
        """Runs until cancelled."""
        failures = 0
        while True:
            await self._open_once()
            now_s = time.monotonic()
            failures = failures + 1 if self.lost_s(now_s) else 0
            if not failures:
                self._lost_since_s = now_s
            await asyncio.sleep(self._backoff.after_s(failures))

    async def _open_once(self) -> None:
        self._cut.clear()
        outbox: Outbox[Up] = Outbox(self._limit)
        for message in self._on_open():
            outbox.put(message)
        self._outbox = outbox
        call = self._dial(outbox)
        reader = asyncio.ensure_future(self._read(call))
        cut = asyncio.ensure_future(self._cut.wait())
        try:
            await asyncio.wait({reader, cut}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._outbox = None
            outbox.close()
            self._on_lost()
            for task in (reader, cut):
                task.cancel()
            await asyncio.gather(reader, cut, return_exceptions=True)
            call.cancel()
            if self._close is not None:
                await self._close()

    async def _read(self, call: ResponseStream[Down]) -> None:
        try:
            async for message in call:
                try:
                    self._on_message(message)
                except InvalidArgument as error:
                    self._on_invalid(error.field)
                    log.warning("%s sent an invalid message: %s; its stream ends", self.name, error)
                    return
                except Exception:
                    log.exception("cannot process a message of %s", self.name)
                self._lost_since_s = None
            log.info("%s closed the stream", self.name)
        except aio.AioRpcError as error:
            log.info("%s is not reachable: %s", self.name, error.details())
