"""The adapters that a worker holds, as the scheduler asks for them."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

from services.worker.engine.mailbox import Perform
from services.worker.engine.runner import EngineRunner
from services.worker.requests.types.limits import NO_ADAPTERS

log = logging.getLogger(__name__)

MAX_ERROR_CHARS = 2_000  # names in an adapter's files can be of any length


class AdapterHost(Protocol):
    """Loads and unloads adapters while requests run."""

    @property
    def held(self) -> Mapping[str, str]:
        """The folder of each adapter that new requests may use, by name."""

    async def hold(self, wanted: Mapping[str, str]) -> Mapping[str, str]:
        """Unloads adapters that are not `wanted` (folders by name), and loads those that are
        missing. Returns a sentence for each that cannot be held, by name."""


class NoAdapters:
    """AdapterHost of an engine without adapters."""

    held: Mapping[str, str] = {}

    async def hold(self, wanted: Mapping[str, str]) -> Mapping[str, str]:
        return dict.fromkeys(wanted, NO_ADAPTERS)


class EngineAdapters:
    """AdapterHost of foretoken's engine. Files are read in a thread, and stored between two
    steps."""

    def __init__(self, store: "AdapterStore", runner: EngineRunner):
        self._store, self._runner = store, runner

    @property
    def held(self) -> Mapping[str, str]:
        return self._store.held

    async def hold(self, wanted: Mapping[str, str]) -> Mapping[str, str]:
        for name, path in self.held.items():
            if wanted.get(name) != path:
                await self._perform(partial(self._store.unload, name))
        errors = {}
        for name, path in wanted.items():
            if name not in self.held:
                try:
                    load = await asyncio.to_thread(self._store.read, name, path)
                    await self._perform(load)
                except ValueError as error:
                    errors[name] = str(error)[:MAX_ERROR_CHARS]
                except Exception:  # of a library that reads the files
                    log.exception("adapter %s in %s", name, path)
                    errors[name] = f"the adapter {name} cannot be read: see the worker's log"
        return errors

    async def _perform(self, work: Callable[[], None]) -> None:
        """Calls `work` on the engine's thread. Raises its ValueError."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def perform() -> None:
            error: ValueError | None = None
            try:
                work()
            except ValueError as found:
                error = found
            loop.call_soon_threadsafe(settle, error)

        def settle(error: ValueError | None) -> None:
            if done.done():  # cancelled
                return
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)

        self._runner.send(Perform(perform))
        await done


class AdapterStore(Protocol):
    """The adapters of an engine. Only `held` and `read` may be used by other threads than the
    engine's."""

    @property
    def held(self) -> Mapping[str, str]: ...

    def read(self, name: str, path: str) -> Callable[[], None]:
        """Reads an adapter's files. Returns what stores them in the engine, which may raise
        ValueError, too. Raises ValueError with a sentence."""

    def unload(self, name: str) -> None: ...
