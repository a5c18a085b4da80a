"""Texts are read in threads: a tokenizer, a chat template or a large body may take seconds, and the
event loop has others' tokens to send."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from contextvars import Context, copy_context
from dataclasses import dataclass
from typing import Any, TypeVar

from gateway.admission.door import Bar, Refused

T = TypeVar("T")

LARGE_BYTES = 64 * 2**10  # what takes some 0.1 s, where most texts take a millisecond
READ_S = 0.01  # a guess at what one takes, for who is told to come again


@dataclass(slots=True, eq=False)
class _Job:
    number: int
    work: Callable[[], Any]
    size_bytes: int
    context: Context  # what is logged is about its request
    done: asyncio.Future[Any]

    @property
    def large(self) -> bool:
        return self.size_bytes > LARGE_BYTES


class ReadingPool:
    """Runs work in `threads`, in the order of coming, but that large texts leave one thread to the
    others, where there are several. As many wait as may, in number and bytes; more are refused.

    Who is cancelled while it waits gives its place back at once; what has begun is finished, and
    nobody learns of it. Used from one event loop. O(1) each; a cancel O(waiting). A thread goes
    from one job to the next by itself, and of several that are done the loop is woken once.
    """

    def __init__(self, threads: int, max_waiting: int, max_waiting_bytes: int):
        self._threads, self._most_large = threads, max(1, threads - 1)
        self._max_waiting, self._max_waiting_bytes = max_waiting, max_waiting_bytes
        self._finished: deque[tuple[_Job, Any, BaseException | None]] = deque()
        self._woken = self._closed = False
        self._change = threading.Condition()  # what is below changes under it alone
        self._waiting: dict[bool, deque[_Job]] = {False: deque(), True: deque()}  # by large or not
        self._waiting_bytes = self._number = self._running_large = 0
        self._started = self._running = 0  # threads, jobs in them

    @property
    def waiting(self) -> int:
        """Jobs that no thread has begun."""
        return sum(map(len, self._waiting.values()))

    @property
    def free(self) -> bool:
        """Whether one that is not large would be begun at once."""
        return self._behind < 0

    async def run(self, work: Callable[[], T], size_bytes: int = 0) -> T:
        """What `work` returns, or raises. It must not touch what belongs to the event loop. Raises
        Refused when too much waits."""
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
        """Its threads end, once they have done what they do."""
        with self._change:
            self._closed = True
            self._change.notify_all()

    @property
    def _behind(self) -> int:
        """Jobs that no thread is there for; negative: threads that none is there for."""
        return self.waiting + self._running - self._threads

    def _check(self, size_bytes: int) -> None:
        behind = self._behind
        full = behind >= self._max_waiting
        if full or (behind > 0 and self._waiting_bytes + size_bytes > self._max_waiting_bytes):
            message = f"{behind} texts of {self._waiting_bytes} bytes wait to be read"
            raise Refused(Bar.READING, message, behind * READ_S)

    def _start(self) -> None:
        self._started += 1
        name, loop = f"reading-{self._started}", asyncio.get_running_loop()
        threading.Thread(target=self._work, args=(loop,), name=name, daemon=True).start()

    def _forget(self, job: _Job) -> None:
        with self._change:
            if job in self._waiting[job.large]:
                self._waiting[job.large].remove(job)
                self._waiting_bytes -= job.size_bytes

    # In its threads

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        job = self._next(None)
        while job is not None:
            result, failure = None, None
            try:
                result = job.context.run(job.work)
            except BaseException as error:  # whoever waits for it is told
                failure = error
            self._finished.append((job, result, failure))
            if not self._woken:
                self._woken = True
                try:
                    loop.call_soon_threadsafe(self._finish)
                except RuntimeError:  # it is closed, and nobody waits
                    return
            job = self._next(job)

    def _next(self, before: _Job | None) -> _Job | None:
        """The first that may be begun, once there is one; None at the end."""
        with self._change:
            if before is not None:
                self._running -= 1
                self._running_large -= before.large
            while (job := self._take()) is None and not self._closed:
                self._change.wait()
            return job

    def _take(self) -> _Job | None:
        lanes = [self._waiting[False]]
        if self._running_large < self._most_large:
            lanes.append(self._waiting[True])
        first = min((lane for lane in lanes if lane), key=lambda lane: lane[0].number, default=None)
        if first is None:
            return None
        job = first.popleft()
        self._waiting_bytes -= job.size_bytes
        self._running += 1
        self._running_large += job.large
        return job

    # On the event loop

    def _finish(self) -> None:
        self._woken = False
        while self._finished:
            job, result, failure = self._finished.popleft()
            if not job.done.done():
                if failure is None:
                    job.done.set_result(result)
                else:
                    job.done.set_exception(failure)
