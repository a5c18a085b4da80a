"""The picker's servicer: Envoy's streams in, and the background work of the pool."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress

from prometheus_client import CollectorRegistry

from protos.generated import ext_proc_pb2 as pb
from protos.generated import ext_proc_pb2_grpc
from services.picker import messages
from services.picker.config import PickerConfig
from services.picker.core.endpoints import Reading
from services.picker.core.picking import Cause, Refusal
from services.picker.core.pool import Limits, Pool
from services.picker.exchange import Exchange
from services.picker.links.forecasts import Forecasts
from services.picker.links.scraper import Scraper
from services.picker.links.sources import EndpointSources
from services.picker.metrics import PickerMetrics
from services.picker.tracker import Tracker
from services.runtime.network.connector import PLAIN, Connector
from services.runtime.network.identity import Role

DRAIN_POLL_S = 0.05
READY_S = 5.0  # wait for a first endpoint; liveness probes read the same status
clock = time.monotonic


class PickerService(ext_proc_pb2_grpc.ExternalProcessorServicer):
    """Picks an endpoint for each HTTP request of a proxy."""

    def __init__(
        self, config: PickerConfig, registry: CollectorRegistry, connector: Connector = PLAIN
    ):
        """Raises ConfigError for sources of endpoints that cannot be used."""
        self._config = config
        self._pool = Pool(
            Limits(
                config.stale_s,
                config.lost_s,
                config.max_wait_s,
                config.fallbacks,
                config.prefix_block_bytes,
                config.prefix_blocks_kept,
                config.scrape_interval_s,
            )
        )
        self.metrics = PickerMetrics(
            registry, lambda: self._pool.health(clock()), lambda: len(self._pool)
        )
        address = config.predictor_address
        self._channel = connector.connect(address, Role.PREDICTOR) if address else None
        self._forecasts = Forecasts(config, self._channel, self.metrics, self._pool.on_forecast)
        self._scraper = Scraper(
            config.metrics_path,
            config.scrape_interval_s,
            config.lost_s,
            self._on_reading,
            lambda address, why: self._pool.on_failure(address, why, clock()),
            lambda result: self.metrics.scrapes.labels(result).inc(),
        )
        self._sources = EndpointSources(config, self._set_endpoints)
        self._tracker = Tracker(
            config, self._pool, self._forecasts, self.metrics, clock, self._sources.priority
        )
        self._streams = 0
        self._was_read = asyncio.Event()  # any endpoint

    async def Process(
        self, requests: AsyncIterator[pb.ProcessingRequest], context: object
    ) -> AsyncIterator[pb.ProcessingResponse]:
        if self._streams >= self._config.max_in_flight:
            refusal = Refusal(Cause.FULL, "too many requests are in flight; retry later", 1.0)
            self._tracker.record_refusal(refusal)
            yield messages.refuse(refusal)
            return
        exchange = Exchange(self._tracker, clock)
        self._streams += 1
        try:
            async for message in requests:
                for answer in await exchange.on(message):
                    yield answer
        finally:
            self._streams -= 1
            exchange.close()

    async def run(self) -> None:
        """Keeps endpoints, their metrics and forecasts current until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._sources.run())
                tasks.create_task(self._scraper.run())
                tasks.create_task(self._forecasts.run())
        finally:
            if self._channel is not None:
                await self._channel.close()

    async def ready(self) -> None:
        """Returns when an endpoint is known, after READY_S at the latest."""
        with suppress(TimeoutError):
            async with asyncio.timeout(READY_S):
                await self._was_read.wait()

    async def drain(self) -> None:
        """Returns when no stream is open."""
        while self._streams:  # noqa: ASYNC110 - there is no event, and a poll costs nothing
            await asyncio.sleep(DRAIN_POLL_S)

    def _set_endpoints(self, addresses: Sequence[str]) -> None:
        self._pool.set_endpoints(addresses, clock())
        self._scraper.follow(addresses)

    def _on_reading(self, address: str, reading: Reading, asked_s: float) -> None:
        self._pool.on_reading(address, reading, asked_s, clock())
        self._was_read.set()
