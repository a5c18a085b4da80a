"""BackendMonitor: waits until a server answers, and watches whether it still does."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from tokenizers import Tokenizer

from services.runtime.config import ConfigError
from services.runtime.network.backoff import Backoff
from services.worker.backend.capacity import Load, parse_metrics, read_load
from services.worker.backend.client import BackendClient, Busy, Denied, Lost, Refused
from services.worker.backend.config import BackendConfig
from services.worker.backend.discovery import METRICS, MODELS, Backend, discover

log = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 2.0  # between two attempts to reach a server
MISSED = 2  # readings in a row without an answer, after which a server is lost
REMIND_S = 30.0  # between two log lines about a server that does not answer


class BackendMonitor:
    """Of one server. `on_up` and `on_down` alternate; `on_load` follows each reading while it is
    up."""

    def __init__(
        self,
        client: BackendClient,
        config: BackendConfig,
        tokenizer: Tokenizer,
        served_model: str,
        on_up: Callable[[Backend], None],
        on_down: Callable[[], None],
        on_load: Callable[[Load], None],
    ):
        self._client, self._config, self._tokenizer = client, config, tokenizer
        self._served_model = served_model
        self._on_up, self._on_down, self._on_load = on_up, on_down, on_load
        self._suspicion = asyncio.Event()

    def suspect(self) -> None:
        """A request could not be served: reads at once instead of at the next interval."""
        self._suspicion.set()

    async def run(self) -> None:
        """Runs until cancelled. Raises ConfigError for a server that cannot be used as configured
        when it first answers; once one was up, a changed one is waited for."""
        known: Backend | None = None
        while True:
            known = await self._until_up(known)
            self._on_up(known)
            await self._until_down(known)
            self._on_down()

    async def _until_up(self, known: Backend | None) -> Backend:
        pauses, failures, remind_s = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S), 0, 0.0
        while True:
            try:
                model = self._config.model
                return await discover(self._client, self._tokenizer, model, self._served_model)
            except ConfigError as error:
                if known is None:
                    raise
                reason = str(error)
            except (Busy, Lost, Denied, Refused) as error:
                reason = str(error)
            if time.monotonic() >= remind_s:
                remind_s = time.monotonic() + REMIND_S
                log.warning("%s; this worker waits for it", reason)
            await asyncio.sleep(pauses.after_s(failures))
            failures += 1

    async def _until_down(self, backend: Backend) -> None:
        """Returns once the server is lost."""
        read: Callable[[], Awaitable[Load]]
        read = self._read_load if backend.has_metrics else self._read_health
        missed = 0
        while missed < MISSED:
            await self._pause()
            try:
                self._on_load(await read())
                missed = 0
            except Busy:  # it answers
                missed = 0
            except (Lost, Denied, Refused) as error:
                missed += 1
                if missed == MISSED:
                    log.warning("%s; its requests move to other workers", error)
                else:
                    self._suspicion.set()

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(self._config.poll_s):
                await self._suspicion.wait()
            await asyncio.sleep(FIRST_PAUSE_S)  # many requests may be lost at once
        except TimeoutError:
            pass
        self._suspicion.clear()

    async def _read_load(self) -> Load:
        return read_load(parse_metrics(await self._client.read_text(METRICS)))

    async def _read_health(self) -> Load:
        await self._client.read_text(MODELS)
        return Load()
