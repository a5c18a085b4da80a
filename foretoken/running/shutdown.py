"""How `foretoken serve` stops, at any moment and without a traceback.

before it is ready     at once; status 130 after Ctrl-C, 143 after SIGTERM
while it serves        once running requests have ended, or at a second signal; status 0
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import TypeVar

from services.runtime.server import Lifecycle

T = TypeVar("T")


class Interrupted(Exception):
    """A signal arrived before the system was ready."""

    def __init__(self, number: int):
        super().__init__(f"stopped by signal {number} during the start")
        self.status = 128 + number


@asynccontextmanager
async def interruptible_start(lifecycle: Lifecycle) -> AsyncIterator[Callable[[], None]]:
    """Cancels the block when a signal arrives, until it calls the yielded function.

    Raises Interrupted instead of whatever the cancellation caused.
    """
    limit = asyncio.timeout(None)

    async def expire() -> None:
        await lifecycle.draining.wait()
        limit.reschedule(asyncio.get_running_loop().time())

    try:
        async with limit:
            watch = asyncio.create_task(expire())
            try:
                yield lambda: _end(watch)
            finally:
                watch.cancel()
    except BaseException:
        if limit.expired():
            raise Interrupted(lifecycle.number) from None
        raise


def _end(watch: asyncio.Task[None]) -> None:
    watch.cancel()


def run_in_daemon_thread(work: Callable[[], T]) -> Future[T]:
    """Runs `work` in a thread that the process does not wait for at exit.

    The future of an executor's thread would delay the exit; this thread is abandoned.
    """
    result: Future[T] = Future()
    result.set_running_or_notify_cancel()  # a later cancel() has no effect on the thread

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name="daemon-work", daemon=True).start()
    return result
