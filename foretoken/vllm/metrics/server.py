"""A port with metrics in vLLM's engine process: vLLM's own page is another process's."""

import asyncio
import threading
from concurrent.futures import Future

from prometheus_client import CollectorRegistry

from observability.exposition import Part
from services.runtime.telemetry.scrape import metrics_over_http

STOP_S = 5.0


class MetricsServer:
    """`GET /metrics` of a registry, from a thread, until `stop`. Raises ConfigError if it cannot
    listen; `port` 0 chooses a free one."""

    def __init__(self, host: str, port: int, registry: CollectorRegistry):
        self._address = host, port
        self._parts = [Part(registry)]
        self._ended = asyncio.Event()
        self._listening: Future[tuple[asyncio.AbstractEventLoop, int]] = Future()
        self._thread = threading.Thread(target=self._run, name="foretoken-metrics", daemon=True)
        self._thread.start()
        self._loop, self.port = self._listening.result()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(STOP_S)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception as error:
            if self._listening.done():
                raise
            self._listening.set_exception(error)

    async def _serve(self) -> None:
        async with metrics_over_http(*self._address, self._parts) as port:
            self._listening.set_result((asyncio.get_running_loop(), port))
            await self._ended.wait()
