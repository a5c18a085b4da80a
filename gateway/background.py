"""Tasks that outlive the request that starts them, within a number."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from services.runtime.errors import Code, ServiceError

log = logging.getLogger(__name__)

RETRY_AFTER_S = 1.0


class BackgroundTasks:
    """Runs tasks by name while `run` runs; its end cancels them and waits for them."""

    def __init__(self, max_tasks: int):
        self._max_tasks = max_tasks
        self._tasks: dict[str, asyncio.Task[None]] = {}
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

    def start(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Starts `work`; an error of it is logged. Raises ServiceError if as many tasks run as may,
        or none may any more."""
        if self._group is None or len(self._tasks) >= self._max_tasks:
            work.close()
            message = f"{len(self._tasks)} requests run in the background; retry later"
            raise ServiceError(Code.RESOURCE_EXHAUSTED, message, RETRY_AFTER_S)
        task = self._tasks[name] = self._group.create_task(_log_errors(name, work))
        task.add_done_callback(lambda _: self._tasks.pop(name, None))

    async def cancel(self, name: str) -> bool:
        """Ends a task and waits for its end. Whether there was one."""
        task = self._tasks.get(name)
        if task is None:
            return False
        task.cancel()
        await asyncio.wait({task})
        return True


async def _log_errors(name: str, work: Coroutine[Any, Any, None]) -> None:
    try:
        await work
    except Exception:
        log.exception("the background task %s failed", name)
