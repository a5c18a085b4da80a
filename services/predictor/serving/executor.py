"""One thread for all that reads and learns from prompts, within a budget of CPU time."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Generic, Protocol, TypeVar

from services.predictor.serving.cpu_budget import Budget

T = TypeVar("T")


class Do(Protocol):
    """Runs work in the thread, and pays for it."""

    def __call__(self, work: Callable[[], T]) -> Awaitable[T]: ...


class Desk:
    """Who asks first has the next turn; a turn begins when the budget allows it.

    What the thread works on, models and encoder, is touched by nothing else, so it needs no locks.
    `close` waits for work that runs, a fraction of a second.
    """

    def __init__(self, share: float, saved_s: float):
        self.budget = Budget(share, saved_s, time.monotonic())
        self._turn = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, "foretoken-read")

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[Do]:
        """The thread for one piece of work, to be chosen now that it can begin."""
        async with self._turn:
            await asyncio.sleep(self.budget.wait_s(time.monotonic()))
            yield self._do

    async def run(self, work: Callable[[], T]) -> T:
        async with self.turn() as do:
            return await do(work)

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    async def _do(self, work: Callable[[], T]) -> T:
        clocked = _Clocked(work)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, clocked)
        finally:
            self.budget.spend(clocked.cpu_s, time.monotonic())


class _Clocked(Generic[T]):
    """Work, and the CPU time that its thread took for it."""

    def __init__(self, work: Callable[[], T]):
        self.cpu_s = 0.0
        self._work = work

    def __call__(self) -> T:
        began_s = time.thread_time()
        try:
            return self._work()
        finally:
            self.cpu_s = time.thread_time() - began_s
