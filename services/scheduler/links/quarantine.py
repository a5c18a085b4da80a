"""Errors in steps of the state: an event is quarantined, or the process ends."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from services.runtime.errors import Code, ServiceError, UnrecoverableError
from services.scheduler.core import events as ev
from services.scheduler.observe.metrics import SchedulerMetrics

log = logging.getLogger(__name__)

MAX_REPR_CHARS = 2_000  # of an event in the log
FROM_STREAMS = ev.Cancelled | ev.WorkerAttached | ev.WorkerDraining | ev.WorkerAlive | ev.Reported


class Quarantine:
    """Logs and counts events whose application raised. `end_serving` ends all streams, at once."""

    def __init__(self, metrics: SchedulerMetrics, end_serving: Callable[[], None]):
        self._metrics, self._end_serving = metrics, end_serving
        self._fatal: asyncio.Queue[Exception] = asyncio.Queue()

    def check(self, step: ev.Step) -> None:
        """Raises ServiceError, in the reader of the stream that an interrupted event came from."""
        if step.error is None:
            return
        kind, event = type(step.event).__name__, repr(step.event)[:MAX_REPR_CHARS]
        self._metrics.count_quarantined(kind)
        log.error("quarantined, for an error in its application: %s", event, exc_info=step.error)
        if isinstance(step.event, FROM_STREAMS):
            sentence = f"the scheduler failed to process a message ({kind}); its log has the reason"
            raise ServiceError(Code.INTERNAL, sentence) from step.error

    @contextmanager
    def around_step(self) -> Iterator[None]:
        """Ends the serving if the step raises: the state must not go on, and `watch` raises."""
        try:
            yield
        except Exception as error:
            log.critical("a step failed, and its state cannot go on", exc_info=error)
            self._fatal.put_nowait(error)
            self._end_serving()
            raise

    async def watch(self) -> None:
        """Raises UnrecoverableError once the state is broken."""
        error = await self._fatal.get()
        raise UnrecoverableError(
            f"the scheduler ends, for an error in a step: {error!r}; its log has the details"
        ) from error
