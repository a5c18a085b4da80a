"""A worker thread with a CPU time budget, for reading prompts and learning from them."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Protocol, TypeVar

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
        """Waits for the thread. The caller selects its work after the wait."""
        async with self._turn:
            await asyncio.sleep(self.budget.wait_s(time.monotonic()))
            yield self._run

    async def run(self, work: Callable[[], T]) -> T:
        async with self.turn() as run:
            return await run(work)

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    async def _run(self, work: Callable[[], T]) -> T:
        cpu_s = 0.0

        def timed() -> T:
            nonlocal cpu_s
            began_s = time.thread_time()
            try:
                return work()
            finally:
                cpu_s = time.thread_time() - began_s

        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, timed)
        finally:
            self.budget.spend(cpu_s, time.monotonic())
