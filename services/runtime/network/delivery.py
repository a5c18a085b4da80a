"""Reliable links to peers: backlogs that are delivered in order, and streams that are reopened."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import grpc
from grpc import aio
from prometheus_client import Counter

from services.runtime.network.backoff import Backoff
from services.runtime.network.streams import ResponseStream

log = logging.getLogger(__name__)
T = TypeVar("T")

MAX_PER_CALL = 1_024  # items of one Forecast or Observe message
MAX_KEPT = 65_536  # texts, questions and outcomes kept while a service is away
RETRIES = Backoff(0.1, 5.0)
# Errors of the connection or the load: the same message may succeed later.
TRANSIENT = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.CANCELLED,
    }
)


def describe(error: Exception) -> str:
    """A failed call in one line, for the log."""
    if isinstance(error, aio.AioRpcError):
        code: grpc.StatusCode = error.code()
        return f"{code.name}: {error.details()}"
    return (isinstance(error, OSError) and error.strerror) or str(error)


class Backlog(Generic[T]):
    """Items to deliver, oldest first. When it is full the oldest is dropped and counted."""

    def __init__(self, max_items: int, dropped: Counter):
        self._items: deque[T] = deque()
        self._max_items = max_items
        self._dropped = dropped
        self._filled = asyncio.Event()

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: T) -> None:
        if len(self._items) >= self._max_items:
            self._items.popleft()
            self._dropped.inc()
        self._items.append(item)
        self._filled.set()

    async def pop(self, max_items: int) -> list[T]:
        """Waits for an item, then returns all that are there, up to `max_items`."""
        while not self._items:
            self._filled.clear()
            await self._filled.wait()
        return [self._items.popleft() for _ in range(min(max_items, len(self._items)))]


async def deliver(send: Callable[[], Awaitable[T]], what: str) -> T | None:
    """Retries `send` until it returns; None if the peer refuses the message permanently. Each
    outage is logged once."""
    failures = 0
    while True:
        try:
            answer = await send()
        except aio.AioRpcError as error:
            if error.code() not in TRANSIENT:
                log.warning("%s: refused with %s; dropped", what, describe(error))
                return None
            if not failures:
                log.warning("%s: %s; retrying", what, describe(error))
            await asyncio.sleep(RETRIES.after_s(failures))
            failures += 1
        else:
            if failures:
                log.warning("%s: delivered after %d failures", what, failures)
            return answer


async def follow(
    open_stream: Callable[[], Awaitable[ResponseStream[T]]], apply: Callable[[T], None], what: str
) -> None:
    """Applies every message of a stream, which is reopened with backoff whenever it ends."""
    failures = 0
    while True:
        try:
            call = await open_stream()
            try:
                async for message in call:
                    failures = 0
                    apply(message)
            finally:
                call.cancel()
        except aio.AioRpcError as error:
            log.info("%s: %s; reconnecting", what, describe(error))
        await asyncio.sleep(RETRIES.after_s(failures))
        failures += 1
