"""How `foretoken serve` is left: at any moment, without a traceback.

before it is ready     at once; status 130 after Ctrl-C, 143 after SIGTERM
while it serves        once the answers that are being given are over, or at a second signal;
                       status 0
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeVar

from services.runtime.server import Lifecycle

T = TypeVar("T")


class Interrupted(Exception):
    """A signal came while all was still starting."""

    def __init__(self, number: int):
        super().__init__(f"left by signal {number} while starting")
        self.status = 128 + number


@asynccontextmanager
async def starting(lifecycle: Lifecycle) -> AsyncIterator[Callable[[], None]]:
    """The block is a start until it calls what this gives: a signal until then ends it. Raises
    Interrupted."""
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
        if limit.expired():  # what broke because of that is nobody's business
            raise Interrupted(lifecycle.number) from None
        raise


def _end(watch: asyncio.Task[None]) -> None:
    watch.cancel()


async def aside(work: Callable[[], T]) -> T:
    """`work` in a thread, so that signals are heard meanwhile. Cancelled, it is left to itself:
    unlike asyncio.to_thread's, nobody waits for it at the end."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: Callable[[], None]) -> None:
        if not done.cancelled():
            result()

    def deliver(result: Callable[[], None]) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result)

    def run() -> None:
        try:
            made = work()
        except BaseException as error:
            deliver(partial(done.set_exception, error))
        else:
            deliver(partial(done.set_result, made))

    threading.Thread(target=run, name="aside", daemon=True).start()
    return await done
