"""Bidirectional streams: a bounded outbox, a reader task, and the responses of a call."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any, Generic, Protocol, TypeVar

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class ResponseStream(Protocol[T_co]):
    """A call with responses to iterate over. The reader cancels it at the end: gRPC leaves the call
    open if the reader is cancelled before it has read."""

    def __aiter__(self) -> AsyncIterator[T_co]: ...

    def cancel(self) -> bool: ...


class Outbox(Generic[T]):
    """Queued messages to one peer. A peer that reads too slowly is disconnected: `overflowed`."""

    def __init__(self, limit: int):
        self._queue: asyncio.Queue[T | None] = asyncio.Queue()
        self._limit = limit
        self.overflowed = False

    def put(self, message: T) -> None:
        if self._queue.qsize() >= self._limit:
            self.overflowed = True
            self.close()
        if not self.overflowed:
            self._queue.put_nowait(message)

    @property
    def empty(self) -> bool:
        return self._queue.empty()

    def close(self) -> None:
        """Ends the stream after the queued messages."""
        self._queue.put_nowait(None)

    async def __aiter__(self) -> AsyncIterator[T]:
        while (message := await self._queue.get()) is not None:
            yield message


async def duplex(read: Coroutine[Any, Any, None], outbox: Outbox[T]) -> AsyncIterator[T]:
    """Yields the outbox's messages while `read` runs; both end together. Raises the errors of
    `read`."""
    reader = asyncio.create_task(read)
    reader.add_done_callback(lambda _: outbox.close())
    try:
        async for message in outbox:
            yield message
        if reader.done():
            await reader
    finally:
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
