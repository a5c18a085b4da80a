"""Concurrent callers' prompts extracted together, off the event loop.

There is no timer: a prompt that finds the worker idle starts at once, and what arrives while a
batch runs is the next batch. So a lone request waits for nothing, and under load batches grow by
themselves to as many prompts as one batch's time brings. A prompt that needs no encoding is
answered on the spot, past the queue.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from services.predictor.encoder.extract import Extracts
from services.predictor.interface import Features, Prompt

Unread = tuple[Prompt, "asyncio.Future[Features]"]


class Busy(Exception):
    """No place in the queue, or nobody serves it (any more): forecast without features."""


class Recalls(Extracts, Protocol):
    """What `Extractor` does: `extract` in one worker thread, `cached` on the event loop."""

    def cached(self, prompt: Prompt) -> Features | None: ...


class Gatherer:
    """Micro-batches for one extractor.

    most: prompts a batch. The encoder gains little beyond a few, and each waits for its whole
    batch. queue_max: prompts that may wait; beyond that `extract` raises Busy.
    """

    def __init__(self, extractor: Recalls, most: int = 16, queue_max: int = 256):
        self._extractor = extractor
        self._most = most
        self._queue: asyncio.Queue[Unread] = asyncio.Queue(queue_max)
        self._batch: list[Unread] = []  # out of the queue, not yet answered
        self._closed = False

    async def extract(self, prompt: Prompt) -> Features:
        """Its features. Raises Busy, or what the extraction of this very prompt raised."""
        if (found := self._extractor.cached(prompt)) is not None:
            return found
        if self._closed:
            raise Busy("prompts are no longer read: the predictor is closing")
        answer: asyncio.Future[Features] = asyncio.get_running_loop().create_future()
        try:
            self._queue.put_nowait((prompt, answer))
        except asyncio.QueueFull:
            raise Busy(f"{self._queue.maxsize} prompts already wait to be read") from None
        return await answer

    async def run(self) -> None:
        """Serve until cancelled; then who still waits gets Busy, and the thread has ended."""
        executor = ThreadPoolExecutor(1, "foretoken-extract")
        try:
            while True:
                await self._take()
                await self._serve(executor)
        finally:
            self._close()
            executor.shutdown(cancel_futures=True)  # a running batch ends first: a fraction of 1 s

    async def _take(self) -> None:
        """The next batch: one prompt at least, those that are still waited for."""
        self._batch = [await self._queue.get()]
        await asyncio.sleep(0)  # who runs in this same tick comes along
        while len(self._batch) < self._most and not self._queue.empty():
            self._batch.append(self._queue.get_nowait())
        self._batch = [waiting for waiting in self._batch if not waiting[1].done()]

    async def _serve(self, executor: ThreadPoolExecutor) -> None:
        try:
            await self._extract(executor, self._batch)
        except Exception:
            for waiting in self._batch:
                await self._alone(executor, waiting)

    async def _extract(self, executor: ThreadPoolExecutor, batch: list[Unread]) -> None:
        prompts = [prompt for prompt, _ in batch]
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(executor, self._extractor.extract, prompts)
        for (_, answer), features in zip(batch, found, strict=True):
            if not answer.done():
                answer.set_result(features)

    async def _alone(self, executor: ThreadPoolExecutor, waiting: Unread) -> None:
        """Once more without the others, one of which may have been the cause."""
        if waiting[1].done():
            return
        try:
            await self._extract(executor, [waiting])
        except Exception as error:
            if not waiting[1].done():
                waiting[1].set_exception(error)

    def _close(self) -> None:
        self._closed = True
        while not self._queue.empty():
            self._batch.append(self._queue.get_nowait())
        for _, answer in self._batch:
            if not answer.done():
                answer.set_exception(Busy("the predictor is closing"))
