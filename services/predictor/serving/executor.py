"""A single worker thread with a CPU time budget, for reading prompts and learning from them."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Generic, Protocol, TypeVar

from services.predictor.serving.cpu_budget import CpuBudget

T = TypeVar("T")


class RunWork(Protocol):
    """Runs work in the thread and charges its CPU time."""

    def __call__(self, work: Callable[[], T]) -> Awaitable[T]: ...


class CpuBudgetedExecutor:
    """Grants turns in request order; a turn starts when the budget allows it.

    Only this thread touches the models and the encoder, so they need no locks. `close` waits for
    running work, a fraction of a second.
    """

    def __init__(self, share: float, saved_s: float):
        self.budget = CpuBudget(share, saved_s, time.monotonic())
        self._turn = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, "foretoken-read")

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[RunWork]:
        """Waits for the thread. The caller chooses its work after the wait, when the work can
        start."""
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
    """Measures the CPU time that its thread spends on the work."""

    def __init__(self, work: Callable[[], T]):
        self.cpu_s = 0.0
        self._work = work

    def __call__(self) -> T:
        began_s = time.thread_time()
        try:
            return self._work()
        finally:
            self.cpu_s = time.thread_time() - began_s
