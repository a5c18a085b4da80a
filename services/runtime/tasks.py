"""Structured background work, and cleanup."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any


@asynccontextmanager
async def background(*work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Runs `work` during the block. An error of `work` ends the block and is raised; the end of the
    block cancels `work` and waits for it."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(each) for each in work]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()


async def run_to_completion(cleanup: Coroutine[Any, Any, None]) -> None:
    """Runs a cleanup to its end even if the waiting task is cancelled, and raises the cancellation
    afterwards. The cleanup must limit its own duration."""
    task, cancelled = asyncio.ensure_future(cleanup), False
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError
    task.result()


def root_cause(error: BaseException) -> BaseException:
    """The first error within nested exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
