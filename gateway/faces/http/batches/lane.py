"""How many choices of batches run at a time: few beside other requests, many on an idle server."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LaneLimits:
    """`busy` choices beside other requests, `idle` ones once there were none for `quiet_s`."""

    busy: int
    idle: int
    quiet_s: float


class Lane:
    """Runs the answers of batches within limits.

    When a client's request arrives at an idle server, the newest answers beyond the limit are ended
    and begin again later: a batch has no deadline that this could miss, and the request would
    otherwise decode beside all of them.
    """

    def __init__(self, limits: LaneLimits, now_s: float):
        self._limits = limits
        self._busy_until_s = now_s + limits.quiet_s
        self._now_s = now_s
        self._running: dict[asyncio.Task[object], int] = {}  # choices of each answer, oldest first
        self._preempted: set[asyncio.Task[object]] = set()
        self._changed = asyncio.Condition()

    @property
    def used(self) -> int:
        """Choices that run."""
        return sum(self._running.values())

    @property
    def limit(self) -> int:
        idle = self._now_s >= self._busy_until_s
        return self._limits.idle if idle else min(self._limits.busy, self._limits.idle)

    async def update(self, others_run: bool, now_s: float) -> None:
        """Adapts to whether requests of clients are live. Called several times a second."""
        self._now_s = now_s
        if others_run:
            self._busy_until_s = now_s + self._limits.quiet_s
        surplus = self.used - self.limit
        for task in reversed(list(self._running)):
            if surplus <= 0 or len(self._running) - len(self._preempted) <= 1:
                break
            if task not in self._preempted:
                self._preempted.add(task)
                task.cancel()
            surplus -= self._running[task]
        async with self._changed:
            self._changed.notify_all()

    async def run(self, choices: int, work: Callable[[], Awaitable[T]]) -> T:
        """The result of `work` once there is room for its choices; one answer always has room."""
        while True:
            async with self._changed:
                await self._changed.wait_for(
                    lambda: not self._running or self.used + choices <= self.limit
                )
                task = asyncio.ensure_future(work())
                self._running[task] = choices
            try:
                return await task
            except asyncio.CancelledError:
                current = asyncio.current_task()
                if task not in self._preempted or (current and current.cancelling()):
                    raise
            finally:
                task.cancel()
                self._preempted.discard(task)
                del self._running[task]
                async with self._changed:
                    self._changed.notify_all()
