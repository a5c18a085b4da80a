"""Structured background work."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any


@asynccontextmanager
async def background(*work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run `work` beside the block. What fails ends the block with its error; leaving the block
    cancels the rest and waits for it."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(each) for each in work]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()


def cause(error: BaseException) -> BaseException:
    """The first plain error inside (groups of) groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
