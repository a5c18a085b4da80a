"""Threads that tokenize prompts and parse large bodies.

This work can take seconds, which would stall the tokens of other requests on the event loop.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from contextvars import Context, copy_context
from dataclasses import dataclass
from typing import Any, TypeVar

from gateway.types.errors import RefusalReason, RequestRefused

T = TypeVar("T")

LARGE_BYTES = 64 * 2**10  # takes about 0.1 s; most texts take about 1 ms
TYPICAL_READ_S = 0.01  # per job, to compute a refused request's retry time


@dataclass(slots=True, eq=False)
class _Job:
    number: int
    work: Callable[[], Any]
    size_bytes: int
    context: Context  # its log lines belong to the request
    done: asyncio.Future[Any]

    @property
    def large(self) -> bool:
        return self.size_bytes > LARGE_BYTES


class ReadingPool:
    """Runs jobs in `threads` in order of arrival. Large jobs leave one of several threads free.

    The queue is limited in jobs and bytes; a job above the limit is refused. A cancelled waiting
    job leaves the queue at once; a cancelled running job finishes and its result is dropped. Used
    from one event loop. O(1) per job, O(waiting) per cancellation. One wake-up of the loop delivers
    all finished jobs.
    """

    def __init__(self, threads: int, max_waiting: int, max_waiting_bytes: int):
        self._threads, self._max_running_large = threads, max(1, threads - 1)
        self._max_waiting, self._max_waiting_bytes = max_waiting, max_waiting_bytes
        self._finished: deque[tuple[_Job, Any, BaseException | None]] = deque()
        self._wake_pending = self._closed = False
        self._change = threading.Condition()  # guards the fields below
        self._waiting: dict[bool, deque[_Job]] = {False: deque(), True: deque()}  # key: large
        self._waiting_bytes = self._number = self._running_large = 0
        self._started = self._running = 0  # threads, running jobs

    @property
    def waiting(self) -> int:
        """Number of jobs that no thread has started."""
        return sum(map(len, self._waiting.values()))

    @property
    def free(self) -> bool:
        """Whether a job that is not large would start at once."""
        return self._behind < 0

    async def run(self, work: Callable[[], T], size_bytes: int = 0) -> T:
        """The result of `work`, which must not use objects of the event loop. Raises what `work`
        raises, or RequestRefused if too many jobs wait."""
        done = asyncio.get_running_loop().create_future()
        with self._change:
            self._check(size_bytes)
            self._number += 1
            job = _Job(self._number, work, size_bytes, copy_context(), done)
            self._waiting[job.large].append(job)
            self._waiting_bytes += size_bytes
            if self._started < min(self._threads, self.waiting + self._running):
                self._start()
            self._change.notify()
        try:
            result: T = await done
            return result
        finally:
            if done.cancelled():
                self._forget(job)

    def close(self) -> None:
        """Ends the threads after their running jobs."""
        with self._change:
            self._closed = True
            self._change.notify_all()

    @property
    def _behind(self) -> int:
        """Jobs in excess of threads; negative: idle threads."""
        return self.waiting + self._running - self._threads

    def _check(self, size_bytes: int) -> None:
        behind = self._behind
        full = behind >= self._max_waiting
        if full or (behind > 0 and self._waiting_bytes + size_bytes > self._max_waiting_bytes):
            message = f"{behind} prompts of {self._waiting_bytes} bytes wait for tokenization"
            raise RequestRefused(RefusalReason.READING, message, behind * TYPICAL_READ_S)

    def _start(self) -> None:
        self._started += 1
        name, loop = f"reading-{self._started}", asyncio.get_running_loop()
        threading.Thread(target=self._work, args=(loop,), name=name, daemon=True).start()

    def _forget(self, job: _Job) -> None:
        with self._change:
            if job in self._waiting[job.large]:
                self._waiting[job.large].remove(job)
                self._waiting_bytes -= job.size_bytes

    # In the threads

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        job = self._next(None)
        while job is not None:
            result, failure = None, None
            try:
                result = job.context.run(job.work)
            except BaseException as error:  # raised in `run`
                failure = error
            self._finished.append((job, result, failure))
            if not self._wake_pending:
                self._wake_pending = True
                try:
                    loop.call_soon_threadsafe(self._finish)
                except RuntimeError:  # the loop is closed
                    return
            job = self._next(job)

    def _next(self, before: _Job | None) -> _Job | None:
        """Waits for the next job that may start; None when the pool is closed."""
        with self._change:
            if before is not None:
                self._running -= 1
                self._running_large -= before.large
            while (job := self._pop()) is None and not self._closed:
                self._change.wait()
            return job

    def _pop(self) -> _Job | None:
        queues = [self._waiting[False]]
        if self._running_large < self._max_running_large:
            queues.append(self._waiting[True])
        first = min(
            (queue for queue in queues if queue), key=lambda queue: queue[0].number, default=None
        )
        if first is None:
            return None
        job = first.popleft()
        self._waiting_bytes -= job.size_bytes
        self._running += 1
        self._running_large += job.large
        return job

    # On the event loop

    def _finish(self) -> None:
        self._wake_pending = False
        while self._finished:
            job, result, failure = self._finished.popleft()
            if not job.done.done():
                if failure is None:
                    job.done.set_result(result)
                else:
                    job.done.set_exception(failure)
