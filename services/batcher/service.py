"""The batcher's servicer: parse a round, ask the policy, encode its decisions."""

import time

import numpy as np
from prometheus_client import CollectorRegistry

from protos import batcher_pb2, batcher_pb2_grpc
from services.batcher.codec import decode_forecasts, decode_group, encode_decision
from services.batcher.config import BatcherConfig
from services.batcher.group import Decision, GroupView, Params
from services.batcher.metrics import BatcherMetrics
from services.batcher.policies import POLICIES, resolve
from services.forecast import ForecastTable
from services.runtime.errors import InvalidArgument


class BatcherService(batcher_pb2_grpc.BatcherServicer):
    """Answers planning rounds; keeps nothing between them, so any replica gives the same answer."""

    def __init__(self, config: BatcherConfig, registry: CollectorRegistry):
        self._config = config
        self._metrics = BatcherMetrics(registry)

    async def Form(
        self, request: batcher_pb2.FormRequest, context: object
    ) -> batcher_pb2.FormResponse:
        params = _resolve(request)
        self._require_bounded(request)
        forecasts = decode_forecasts(request.forecasts)
        table = ForecastTable(forecasts)
        views = [
            decode_group(i, group, table, len(forecasts)) for i, group in enumerate(request.groups)
        ]
        decisions = self._decide(request.policy, request.round, views, params)
        names = (group.worker_id for group in request.groups)
        return batcher_pb2.FormResponse(batches=map(encode_decision, names, decisions))

    def _decide(
        self, policy: str, round_number: int, views: list[GroupView], params: Params
    ) -> list[Decision]:
        started_s = time.perf_counter()
        decisions = [
            POLICIES[policy](view, params, np.random.default_rng((round_number, i)))
            for i, view in enumerate(views)
        ]
        self._metrics.policy_seconds.labels(policy).observe(time.perf_counter() - started_s)
        self._metrics.rounds.labels(policy).inc()
        self._metrics.admitted.labels(policy).inc(sum(d.admit for d in decisions))
        return decisions

    def _require_bounded(self, request: batcher_pb2.FormRequest) -> None:
        rows = sum(
            len(g.running.prompt_tokens) + len(g.queued.prompt_tokens) for g in request.groups
        )
        for field, count, most in (
            ("groups", len(request.groups), self._config.groups_max),
            ("groups", rows, self._config.rows_max),
            ("forecasts", len(request.forecasts), self._config.rows_max),
        ):
            if count > most:
                raise InvalidArgument(field, f"at most {most} a call, got {count}")


def _resolve(request: batcher_pb2.FormRequest) -> dict[str, float]:
    try:
        return resolve(request.policy, request.params)
    except ValueError as error:
        raise InvalidArgument("policy", str(error)) from None
