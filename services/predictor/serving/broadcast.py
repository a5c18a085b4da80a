"""Sends each message to all listeners."""

import asyncio
from collections.abc import AsyncGenerator, Iterable
from typing import Generic, TypeVar

T = TypeVar("T")


class Broadcast(Generic[T]):
    """Listeners receive every message pushed while they listen.

    When a listener is `limit` messages behind, its oldest message is dropped and counted in
    `dropped`.
    """

    def __init__(self, limit: int):
        self.dropped = 0
        self._limit = limit
        self._listeners: set[asyncio.Queue[T]] = set()

    def __len__(self) -> int:
        return len(self._listeners)

    def push(self, message: T) -> None:
        for queue in self._listeners:
            if queue.full():
                queue.get_nowait()
                self.dropped += 1
            queue.put_nowait(message)

    async def listen(self, first: Iterable[T] = ()) -> AsyncGenerator[T, None]:
        """Yields `first` and then each message, until the listener closes the generator."""
        queue: asyncio.Queue[T] = asyncio.Queue(self._limit)
        for message in first:
            queue.put_nowait(message)
        self._listeners.add(queue)
        try:
            while True:
                yield await queue.get()
        finally:
            self._listeners.discard(queue)
