"""Between the event loop and the engine's thread: calls for the other side to make, in order."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable

Call = Callable[[], None]

UNHEARD_MAX = 4_096  # a step posts a few; the engine waits for a loop that is so far behind


class Inbox:
    """Calls for the engine's thread. `put` from any thread, `take` from the engine's alone."""

    def __init__(self) -> None:
        self._calls: deque[Call] = deque()
        self._some = threading.Condition()

    def __len__(self) -> int:
        return len(self._calls)

    def put(self, call: Call) -> None:
        with self._some:
            self._calls.append(call)
            self._some.notify()

    def take(self, wait_s: float) -> list[Call]:
        """All there are; where there are none, those that come within `wait_s`."""
        if not self._calls and not wait_s:
            return []
        with self._some:
            if not self._calls:
                self._some.wait(wait_s)
            calls = list(self._calls)
            self._calls.clear()
        return calls


class Outbox:
    """Calls for the event loop, which makes all there are in one turn.

    `post` is the engine's thread's; it waits while UNHEARD_MAX are not made yet.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = loop
        self._calls: deque[Call] = deque()
        self._woken = False  # the loop, since it last looked
        self._room = threading.Semaphore(UNHEARD_MAX)

    def post(self, call: Call) -> None:
        self._room.acquire()
        self._calls.append(call)
        if not self._woken:
            self._woken = True
            self._loop.call_soon_threadsafe(self.deliver)

    def deliver(self) -> None:
        """Make all that wait, in order."""
        self._woken = False  # before looking: what is posted from here on wakes the loop again
        while self._calls:
            call = self._calls.popleft()
            self._room.release()
            call()
