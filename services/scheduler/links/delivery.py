"""Telling a service something that must not be lost: kept, in order, until it is told."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import grpc
from grpc import aio
from prometheus_client import Counter

from services.runtime.backoff import Backoff
from services.scheduler.links.interface import sentence

log = logging.getLogger(__name__)
T = TypeVar("T")

RETRIES = Backoff(0.1, 5.0)
# Told again: nothing is wrong with what was said. Anything else would fail again.
PASSING = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.CANCELLED,
    }
)


class Backlog(Generic[T]):
    """What is still to be told, oldest first; when full the oldest makes room, and is counted."""

    def __init__(self, most: int, dropped: Counter):
        self._items: deque[T] = deque()
        self._most = most
        self._dropped = dropped
        self._filled = asyncio.Event()

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: T) -> None:
        if len(self._items) >= self._most:
            self._items.popleft()
            self._dropped.inc()
        self._items.append(item)
        self._filled.set()

    async def take(self, most: int) -> list[T]:
        """Wait for one, then take all that came with it."""
        while not self._items:
            self._filled.clear()
            await self._filled.wait()
        return [self._items.popleft() for _ in range(min(most, len(self._items)))]


async def deliver(send: Callable[[], Awaitable[T]], what: str) -> T | None:
    """`send`'s answer, tried until there is one; None when it is refused for good.

    Said in the log once an outage.
    """
    failures = 0
    while True:
        try:
            answer = await send()
        except aio.AioRpcError as error:
            if error.code() not in PASSING:
                log.warning("%s: %s; not said again", what, sentence(error))
                return None
            if not failures:
                log.warning("%s: %s; kept, and said again", what, sentence(error))
            await asyncio.sleep(RETRIES.after_s(failures))
            failures += 1
        else:
            if failures:
                log.warning("%s: said at last", what)
            return answer
