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
    """Logs and counts the events that the state failed to apply."""

    def __init__(self, metrics: SchedulerMetrics, end_serving: Callable[[], None]):
        """`end_serving` ends all streams at once."""
        self._metrics, self._end_serving = metrics, end_serving
        self._broken = asyncio.Event()
        self._cause: Exception | None = None

    def check(self, step: ev.Step) -> None:
        """Raises ServiceError, in the reader of the stream that an interrupted event came from."""
        if step.error is None:
            return
        kind, event = type(step.event).__name__, repr(step.event)[:MAX_REPR_CHARS]
        self._metrics.count_quarantined(kind)
        log.error("an event could not be applied: %s", event, exc_info=step.error)
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
            self._cause = error
            self._broken.set()
            self._end_serving()
            raise

    async def watch(self) -> None:
        """Raises UnrecoverableError once the state is broken."""
        await self._broken.wait()
        raise UnrecoverableError(
            f"the scheduler ends after an error in a step: {self._cause!r}; its log has the details"
        ) from self._cause
