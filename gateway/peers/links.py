"""The gateway's streams to others: open, greet, reconnect with backoff; every queue bounded."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Generic, Protocol, TypeVar

from grpc import aio

from services.runtime.backoff import Backoff
from services.runtime.streams import Outbox

log = logging.getLogger(__name__)

Up = TypeVar("Up")
Down = TypeVar("Down")
DownCo = TypeVar("DownCo", covariant=True)


class OpenStream(Protocol[DownCo]):
    """An open bidirectional stream as its reader sees it."""

    def __aiter__(self) -> AsyncIterator[DownCo]: ...
    def cancel(self) -> bool: ...


Dial = Callable[[Outbox[Up]], OpenStream[Down]]


class Link(Generic[Up, Down]):
    """One stream, kept open for as long as `run` is: whenever it breaks, it is opened anew.

    `on_open` gives the first messages of each opening; what was queued before is dropped, since
    its owner says again there what still counts. `on_lost` is told of the end of each.
    `on_message` must not raise for bad content.
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
        close: Callable[[], Awaitable[None]] | None = None,
    ):
        """`close` is run at the end, for what the link owns."""
        self.name = name
        self._lost_since_s: float | None = time.monotonic()  # None once heard of
        self._close = close
        self._dial, self._on_open = dial, on_open
        self._on_message, self._on_lost = on_message, on_lost
        self._backoff, self._limit = backoff, limit
        self._outbox: Outbox[Up] | None = None
        self._overflow = asyncio.Event()

    def lost_s(self, now_s: float) -> float:
        """For how long it has not been heard of since it broke; 0 while connected."""
        return 0.0 if self._lost_since_s is None else now_s - self._lost_since_s

    def send(self, message: Up) -> bool:
        """Queue a message on the open stream; False when there is none. A peer that lets its
        queue overflow is treated as lost."""
        if self._outbox is None:
            return False
        self._outbox.put(message)
        if not self._outbox.overflowed:
            return True
        log.warning("%s takes no more messages; opening the stream anew", self.name)
        self._outbox = None
        self._overflow.set()
        return False

    async def run(self) -> None:
        """Until cancelled."""
        try:
            await self._keep_open()
        finally:
            if self._close is not None:
                await self._close()

    async def _keep_open(self) -> None:
        failures = 0
        while True:
            await self._open_once()
            now_s = time.monotonic()
            failures = failures + 1 if self.lost_s(now_s) else 0
            if not failures:
                self._lost_since_s = now_s
            await asyncio.sleep(self._backoff.after_s(failures))

    async def _open_once(self) -> None:
        self._overflow.clear()
        outbox: Outbox[Up] = Outbox(self._limit)
        for message in self._on_open():
            outbox.put(message)
        self._outbox = outbox
        call = self._dial(outbox)
        reader = asyncio.ensure_future(self._read(call))
        overflow = asyncio.ensure_future(self._overflow.wait())
        try:
            await asyncio.wait({reader, overflow}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._outbox = None
            outbox.close()
            self._on_lost()
            for task in (reader, overflow):
                task.cancel()
            await asyncio.gather(reader, overflow, return_exceptions=True)
            call.cancel()

    async def _read(self, call: OpenStream[Down]) -> None:
        try:
            async for message in call:
                self._lost_since_s = None
                try:
                    self._on_message(message)
                except Exception:
                    log.exception("a message of %s was not understood", self.name)
            log.info("%s closed the stream", self.name)
        except aio.AioRpcError as error:
            log.info("%s is not reachable: %s", self.name, error.details())


class WorkerLinks(Generic[Up, Down]):
    """One link a worker address, opened on first use, dropped when the fleet no longer has it."""

    def __init__(self, make: Callable[[str], Link[Up, Down]]):
        self._make = make
        self._links: dict[str, Link[Up, Down]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._group: asyncio.TaskGroup | None = None

    def serve_in(self, group: asyncio.TaskGroup | None) -> None:
        """The task group that owns all links; None when it is gone."""
        self._group = group
        if group is None:
            self._links.clear()
            self._tasks.clear()

    def send(self, address: str, message: Up) -> bool:
        """Queue on the open stream to `address`; False when it has yet to be opened (again),
        which then begins with what its `on_open` says."""
        link = self._links.get(address)
        if link is not None:
            return link.send(message)
        if self._group is not None:
            link = self._links[address] = self._make(address)
            self._tasks[address] = self._group.create_task(link.run())
        return False

    def keep_only(self, addresses: Iterable[str]) -> None:
        for address in self._links.keys() - set(addresses):
            del self._links[address]
            self._tasks.pop(address).cancel()
