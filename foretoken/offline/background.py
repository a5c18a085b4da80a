"""A system that runs on an event loop of its own thread, for blocking callers."""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import Any, TypeVar

import uvloop

from foretoken.running.inprocess import RunningSystem, running_system
from foretoken.running.options import ServeOptions
from services.runtime.server import Lifecycle
from services.runtime.tasks import root_cause

T = TypeVar("T")
JOIN_S = 60.0  # longer than the grace of a child process


class BackgroundSystem:
    """Started when constructed, and ready. Raises ConfigError for a mistake in the settings."""

    def __init__(self, options: ServeOptions):
        self._lifecycle = Lifecycle()
        self._loop = uvloop.new_event_loop()
        self._stop = asyncio.Event()
        self._ended: BaseException | None = None
        started: Future[RunningSystem] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(options, started), name="foretoken", daemon=True
        )
        self._thread.start()
        try:
            self.system = started.result()
        except BaseException:
            self.close()
            raise

    def run(self, job: Coroutine[Any, Any, T]) -> T:
        """Returns the result of `job`. Cancels it if this thread is interrupted. Raises what the
        job or the system raises."""
        if not self._thread.is_alive():
            job.close()
            raise self._ended or RuntimeError("the system is closed")
        running = asyncio.run_coroutine_threadsafe(job, self._loop)
        try:
            return running.result()
        except CancelledError:
            self._thread.join(JOIN_S)
            raise self._ended or RuntimeError("the system is closed") from None
        except BaseException as error:
            running.cancel()
            raise root_cause(error) from None

    def close(self) -> None:
        """Ends running jobs, and stops all processes. Does nothing once it is closed."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(JOIN_S)

    def _run(self, options: ServeOptions, started: "Future[RunningSystem]") -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._serve(options, started))
        except BaseException as error:
            self._ended = root_cause(error)
            if not started.done():
                started.set_exception(self._ended)

    async def _serve(self, options: ServeOptions, started: "Future[RunningSystem]") -> None:
        async with running_system(options, self._lifecycle) as system:
            stopping = asyncio.ensure_future(self._stop.wait())
            ready = asyncio.ensure_future(system.wait_until_ready())
            await asyncio.wait({stopping, ready}, return_when=asyncio.FIRST_COMPLETED)
            if ready.done():
                ready.result()
                started.set_result(system)
                await stopping
            ready.cancel()
