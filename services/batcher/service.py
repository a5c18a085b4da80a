"""The batcher's servicer: decodes candidates, arranges them, encodes the decision."""

import time
from collections.abc import AsyncIterator

import numpy as np
from prometheus_client import CollectorRegistry

from protos.generated import batcher_pb2, batcher_pb2_grpc
from services.batcher.config import BatcherConfig
from services.batcher.metrics import BatcherMetrics
from services.forecasttable import ForecastTable
from services.policies.decide import arrange
from services.policies.preset import Preset
from services.runtime.codecs.arrange import decode_candidates, decode_hello, encode_decision
from services.runtime.errors import InvalidArgument
from services.runtime.network.peer_limits import PeerLimits


class BatcherService(batcher_pb2_grpc.BatcherServicer):
    """Arranges rounds. Its state lives as long as a stream, so any replica gives the same answer to
    a scheduler that reconnects."""

    def __init__(self, config: BatcherConfig, registry: CollectorRegistry):
        self._config = config
        self.metrics = BatcherMetrics(registry)
        most = {"scheduler": config.max_schedulers}
        self._limits = PeerLimits(config.section, most, config.hello_wait_s)

    async def Arrange(
        self, requests: AsyncIterator[batcher_pb2.ArrangeMessage], context: object
    ) -> AsyncIterator[batcher_pb2.Arrangement]:
        with self._limits.stream("scheduler"):
            first = await self._limits.read_hello(requests)
            preset, table = decode_hello(first.hello), ForecastTable()
            async for message in requests:
                if message.HasField("candidates"):
                    yield self._arrange(message.candidates, preset, table)

    def _arrange(
        self, message: batcher_pb2.Candidates, preset: Preset, table: ForecastTable
    ) -> batcher_pb2.Arrangement:
        started_s = time.perf_counter()
        self._require_bounded(message)
        candidates = decode_candidates(message, table)
        decision = arrange(candidates, table, preset, np.random.default_rng(candidates.round))
        answer = encode_decision(decision)
        self.metrics.observe_round(preset.name, time.perf_counter() - started_s)
        return answer

    def _require_bounded(self, message: batcher_pb2.Candidates) -> None:
        for field, count, limit in (
            ("workers", len(message.workers), self._config.workers_max),
            ("rows", len(message.rows) // 8, self._config.rows_max),
            ("forecasts", len(message.forecasts), self._config.rows_max),
        ):
            if count > limit:
                raise InvalidArgument(field, f"at most {limit} per round, got {count}")
