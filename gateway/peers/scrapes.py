"""What the gateway's `/metrics` tells: of its own process, and of its peers that answer in time."""

import asyncio
import logging
from collections.abc import Callable, Sequence

from grpc import aio
from prometheus_client import Gauge

from gateway.config import GatewayConfig
from observability.exposition import Part, expose, merge, with_aliases
from observability.metrics.vllm import ALIASES
from protos.generated import telemetry_pb2
from protos.generated.telemetry_pb2_grpc import TelemetryStub

log = logging.getLogger(__name__)


class Peer:
    """A process that tells its metrics over gRPC. That it is away is logged once, until it is
    back."""

    def __init__(self, address: str, connect: Callable[[str], aio.Channel]):
        self._address, self._connect = address, connect
        self._channel: aio.Channel | None = None  # made on the event loop that asks
        self._away = False

    async def ask(self, wait_s: float) -> str | None:
        """Its text; None when it has none to give within `wait_s`."""
        if self._channel is None:
            self._channel = self._connect(self._address)
        stub = TelemetryStub(self._channel)
        try:
            answer = await stub.Scrape(telemetry_pb2.ScrapeRequest(), timeout=wait_s)
        except aio.AioRpcError as error:
            if not self._away:
                why = error.details() or error.code().name
                log.warning("metrics of %s are left out: %s", self._address, why)
            self._away = True
            return None
        if self._away:
            log.info("metrics of %s are back", self._address)
        self._away = False
        return answer.text

    async def close(self) -> None:
        if self._channel is not None:
            channel, self._channel = self._channel, None
            await channel.close()


class Scrapes:
    """One text of all. Peers are asked at the same time, and whoever is late or away is left out
    and counted in `missing`: a scrape takes no longer than `metrics_wait_s`."""

    def __init__(
        self,
        config: GatewayConfig,
        parts: Sequence[Part],
        connect: Callable[[str], aio.Channel],
        missing: Gauge,
    ):
        self._wait_s, self._vllm = config.metrics_wait_s, config.vllm_metrics
        self._parts, self._missing = parts, missing
        self._peers = [Peer(address, connect) for address in config.metrics_peers]
        self._gathering: asyncio.Task[str] | None = None

    async def text(self) -> str:
        """Who asks while peers are being asked gets the same text: many cost no more than one."""
        if self._gathering is None or self._gathering.done():
            self._gathering = asyncio.create_task(self._gather())
        return await asyncio.shield(self._gathering)

    async def close(self) -> None:
        if self._gathering is not None:
            self._gathering.cancel()
            await asyncio.gather(self._gathering, return_exceptions=True)
        for peer in self._peers:
            await peer.close()

    async def _gather(self) -> str:
        told = await asyncio.gather(*(peer.ask(self._wait_s) for peer in self._peers))
        self._missing.set(told.count(None))
        text = merge([expose(self._parts), *(each for each in told if each is not None)])
        return with_aliases(text, ALIASES) if self._vllm else text
