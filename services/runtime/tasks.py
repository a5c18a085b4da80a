"""Structured background work."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any


@asynccontextmanager
async def background(*work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Runs `work` during the block. Its failure ends the block with its error; leaving the block
    cancels it and waits for it."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(each) for each in work]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()


async def to_its_end(cleanup: Coroutine[Any, Any, None]) -> None:
    """Runs a cleanup completely, however often the waiting task is cancelled; the cancellation is
    raised afterwards. The cleanup must be bounded by itself."""
    task, cancelled = asyncio.ensure_future(cleanup), False
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError
    task.result()


def cause(error: BaseException) -> BaseException:
    """The first plain error inside (groups of) groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
