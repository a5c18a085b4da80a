"""Tasks that outlive the request that starts them, within a number."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from services.runtime.errors import Code, ServiceError

log = logging.getLogger(__name__)

RETRY_AFTER_S = 1.0

Work = Coroutine[Any, Any, None]


class BackgroundTasks:
    """Runs tasks by name while `run` runs; its end cancels them and waits for them.

    `companion` starts with the first task, and with any later one if it has returned by then.
    """

    def __init__(self, max_tasks: int):
        self.companion: Callable[[], Work] | None = None
        self._max_tasks = max_tasks
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._beside: asyncio.Task[None] | None = None  # the companion
        self._group: asyncio.TaskGroup | None = None

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._tasks)

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as self._group:
                await asyncio.Event().wait()
        finally:
            self._group = None

    def check_room(self) -> asyncio.TaskGroup:
        """The group of a further task. Raises ServiceError if as many tasks run as may, or none may
        any more."""
        if self._group is None or len(self._tasks) >= self._max_tasks:
            message = f"{len(self._tasks)} requests run in the background; retry later"
            raise ServiceError(Code.RESOURCE_EXHAUSTED, message, RETRY_AFTER_S)
        return self._group

    def start(self, name: str, work: Callable[[], Work]) -> None:
        """Starts a task; an error of it is logged. Raises what `check_room` raises."""
        group = self.check_room()
        task = self._tasks[name] = group.create_task(_log_errors(name, work))
        task.add_done_callback(lambda _: self._tasks.pop(name, None))
        if self.companion and (self._beside is None or self._beside.done()):
            self._beside = group.create_task(_log_errors("companion", self.companion))

    async def cancel(self, name: str) -> bool:
        """Ends a task and waits for its end. Whether there was one."""
        task = self._tasks.get(name)
        if task is None:
            return False
        task.cancel()
        await asyncio.wait({task})
        return True


async def _log_errors(name: str, work: Callable[[], Work]) -> None:
    try:
        await work()
    except Exception:
        log.exception("the background task %s failed", name)
