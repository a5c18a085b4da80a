"""One message to everybody who listens."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Generic, TypeVar

T = TypeVar("T")


class Feed(Generic[T]):
    """Every listener gets what is pushed while it listens; of one that is `most` behind the oldest
    is dropped, counted in `dropped`: the newest is worth most."""

    def __init__(self, most: int):
        self.dropped = 0
        self._most = most
        self._listeners: set[asyncio.Queue[T]] = set()

    def __len__(self) -> int:
        return len(self._listeners)

    def push(self, message: T) -> None:
        for queue in self._listeners:
            if queue.full():
                queue.get_nowait()
                self.dropped += 1
            queue.put_nowait(message)

    async def listen(self) -> AsyncGenerator[T, None]:
        """Until the listener leaves."""
        queue: asyncio.Queue[T] = asyncio.Queue(self._most)
        self._listeners.add(queue)
        try:
            while True:
                yield await queue.get()
        finally:
            self._listeners.discard(queue)
