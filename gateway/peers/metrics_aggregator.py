"""The gateway's `/metrics`: the metrics of this process and of its peers."""

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence

from grpc import aio
from prometheus_client import Gauge

from gateway.config import GatewayConfig
from observability.exposition import Exposition, Part
from observability.merging import Blocks, Merger, split_blocks
from observability.metrics.vllm import ALIASES, MODEL_SERVER_ALIASES
from protos.generated import telemetry_pb2
from protos.generated.telemetry_pb2_grpc import TelemetryStub
from services.runtime.bounded_dict import BoundedDict

MAX_KEPT = 4  # answers, for different names

log = logging.getLogger(__name__)


class Peer:
    """A process that serves its metrics over gRPC. Its loss and its return are logged once each."""

    def __init__(self, address: str, connect: Callable[[str], aio.Channel]):
        self._address, self._connect = address, connect
        self._channel: aio.Channel | None = None  # created on the event loop that uses it
        self._missing = False

    async def scrape(self, names: Collection[str], timeout_s: float) -> Blocks | None:
        """Its metrics with these names, or all; None without an answer within `timeout_s`."""
        if self._channel is None:
            self._channel = self._connect(self._address)
        stub = TelemetryStub(self._channel)
        request = telemetry_pb2.ScrapeRequest(names=names)
        try:
            answer = await stub.Scrape(request, timeout=timeout_s)
        except aio.AioRpcError as error:
            if not self._missing:
                reason = error.details() or error.code().name
                log.warning("/metrics omits %s, which does not answer: %s", self._address, reason)
            self._missing = True
            return None
        if self._missing:
            log.info("/metrics includes %s again", self._address)
        self._missing = False
        return split_blocks(answer.text)

    async def close(self) -> None:
        if self._channel is not None:
            channel, self._channel = self._channel, None
            await channel.close()


class MetricsAggregator:
    """Merges the metrics of all peers, which are scraped concurrently, at most once in
    `metrics_age_s`. A late or missing peer is omitted and counted in `missing`: a scrape takes at
    most `metrics_wait_s`."""

    def __init__(
        self,
        config: GatewayConfig,
        parts: Sequence[Part],
        connect: Callable[[str], aio.Channel],
        missing: Sequence[Gauge],
    ):
        """`missing`: a gauge for each model, all with the same value."""
        self._timeout_s, self._age_s = config.metrics_wait_s, config.metrics_age_s
        self._aliases = ALIASES if config.vllm_metrics else MODEL_SERVER_ALIASES
        self._exposition, self._missing = Exposition(parts), missing
        self._merger = Merger(self._aliases)
        # By names, with the time at which they were asked for.
        self._answers: BoundedDict[frozenset[str], tuple[float, list[Blocks]]] = BoundedDict(
            MAX_KEPT
        )
        self._peers = [Peer(address, connect) for address in config.metrics_peers]
        self._scrapes: dict[frozenset[str], asyncio.Task[bytes]] = {}

    async def text(self, names: Collection[str] = ()) -> bytes:
        """All metrics, or the series with these names, which may be vLLM's: a scrape of a few costs
        a small part of one of all. Concurrent calls for the same names share one scrape."""
        asked = frozenset(names)
        if asked not in self._scrapes:
            scrape = self._scrapes[asked] = asyncio.create_task(self._scrape_peers(asked))
            scrape.add_done_callback(lambda _: self._scrapes.pop(asked))
        return await asyncio.shield(self._scrapes[asked])

    async def close(self) -> None:
        scrapes = list(self._scrapes.values())
        for scrape in scrapes:
            scrape.cancel()
        await asyncio.gather(*scrapes, return_exceptions=True)
        for peer in self._peers:
            await peer.close()

    async def _scrape_peers(self, asked: frozenset[str]) -> bytes:
        own = asked | {name for name, alias in self._aliases.items() if alias in asked}
        answers = await self._ask_peers(own)
        merger = Merger(self._aliases) if asked else self._merger
        return merger.merge([*self._exposition.blocks(own), *answers])

    async def _ask_peers(self, names: frozenset[str]) -> list[Blocks]:
        """The metrics of the peers that answer."""
        now = asyncio.get_running_loop().time()
        if names in self._answers:
            asked_s, answers = self._answers[names]
            if now - asked_s < self._age_s:
                return answers
        scrapes = (peer.scrape(names, self._timeout_s) for peer in self._peers)
        found = await asyncio.gather(*scrapes)
        for gauge in self._missing:
            gauge.set(found.count(None))
        answers = [answer for answer in found if answer is not None]
        self._answers[names] = now, answers
        return answers
