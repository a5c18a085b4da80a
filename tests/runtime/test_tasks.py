"""Cleanups that complete although the waiting task is cancelled."""

import asyncio

import pytest

from services.runtime.tasks import run_to_completion


async def test_cleanup_completes_despite_two_cancellations() -> None:
    began, may, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def cleanup() -> None:
        began.set()
        await may.wait()
        ended.set()

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await run_to_completion(cleanup())

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    for _ in range(3):
        task.cancel()
        await began.wait()
    assert not task.done()
    may.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


async def test_cleanup_error_is_raised() -> None:
    async def breaks() -> None:
        raise ValueError("it broke")

    with pytest.raises(ValueError, match="it broke"):
        await run_to_completion(breaks())
