"""The estimator's servicer: receives timings, fits cost models and streams them to watchers."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from time import monotonic

import grpc
from prometheus_client import CollectorRegistry

from protos.generated import estimator_pb2, estimator_pb2_grpc
from services.costs import BatchTiming, StepTiming, SwapTiming, is_possible_s
from services.estimator.config import EstimatorConfig
from services.estimator.metrics import EstimatorMetrics
from services.estimator.state import EstimatorState
from services.runtime.codecs.common import (
    decode_batch,
    decode_swaps,
    decode_timing,
    encode_cost_model,
)
from services.runtime.errors import InvalidArgument, ServiceError

MAX_PER_CALL = 1_024  # timings per Observe; likewise swaps and batches
MAX_NAME_CHARS = 256


class EstimatorService(estimator_pb2_grpc.EstimatorServicer):
    """Fits and serves cost models by worker."""

    def __init__(self, config: EstimatorConfig, registry: CollectorRegistry):
        self._state = EstimatorState(
            config.window,
            config.refit_samples,
            config.workers_max,
            config.learning,
            config.refit_interval_s,
        )
        self.metrics = EstimatorMetrics(registry)
        self._watchers_max = config.watchers_max
        self._watching: Counter[str] = Counter()  # watchers by worker
        self._changed = asyncio.Event()  # set and replaced when any worker has a new model

    async def GetCostModel(
        self, request: estimator_pb2.GetCostModelRequest, context: object
    ) -> estimator_pb2.CostModel:
        model = self._state.model(_worker_id(request.worker_id))
        if model is None:
            raise ServiceError(
                grpc.StatusCode.NOT_FOUND,
                f"worker {request.worker_id!r} has no cost model yet: too few step timings",
            )
        return encode_cost_model(request.worker_id, model)

    async def WatchCostModel(
        self, request: estimator_pb2.GetCostModelRequest, context: object
    ) -> AsyncIterator[estimator_pb2.CostModel]:
        """Streams new versions. A slow reader may miss intermediate ones."""
        worker_id = _worker_id(request.worker_id)
        self._enter_watch(worker_id)
        try:
            sent = 0
            while True:
                changed = self._changed
                model = self._state.model(worker_id)
                if model is not None and model.version != sent:
                    sent = model.version
                    yield encode_cost_model(worker_id, model)
                await changed.wait()
        finally:
            self._leave_watch(worker_id)

    async def Observe(
        self, request: estimator_pb2.ObserveTimingsRequest, context: object
    ) -> estimator_pb2.ObserveTimingsResponse:
        worker_id = _worker_id(request.worker_id)
        _require_few("timings", len(request.timings))
        _require_few("swaps", len(request.swaps))
        _require_few("batches", len(request.batches))
        timings, swaps = [decode_timing(t) for t in request.timings], decode_swaps(request.swaps)
        batches = [decode_batch(b) for b in request.batches]
        self._count_impossible(timings=timings, swaps=swaps, batches=batches)
        with self.metrics.observe_seconds.time():
            seen = self._state.observe(worker_id, timings, swaps, batches, monotonic())
        self.metrics.observed(len(request.timings), len(request.swaps), len(batches), seen)
        if seen.changed:
            self.metrics.refits.inc(seen.refitted)
            self._announce(worker_id)
        return estimator_pb2.ObserveTimingsResponse(version=seen.version)

    def _count_impossible(self, **samples: Sequence[StepTiming | SwapTiming | BatchTiming]) -> None:
        """Counts times that cannot be true, by field. The state leaves them out."""
        for field, each in samples.items():
            for sample in each:
                if not is_possible_s(sample.elapsed_s):
                    self.metrics.invalid.count("Observe", f"{field}.elapsed_s")

    def _announce(self, worker_id: str) -> None:
        self._update_metrics(worker_id)
        self._changed.set()
        self._changed = asyncio.Event()

    def _update_metrics(self, worker_id: str) -> None:
        """Exports the worker's metrics while it is watched, so that workers that left disappear."""
        model = self._state.model(worker_id)
        if model is not None and worker_id in self._watching:
            self.metrics.show(worker_id, model, self._state.batch_error(worker_id))

    def _enter_watch(self, worker_id: str) -> None:
        if self._watching.total() >= self._watchers_max:
            raise ServiceError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{self._watchers_max} streams already watch cost models; close one or raise "
                "estimator.watchers_max",
            )
        self._watching[worker_id] += 1
        self.metrics.watchers.set(self._watching.total())
        self._update_metrics(worker_id)

    def _leave_watch(self, worker_id: str) -> None:
        """Removes the worker's metrics with its last watcher."""
        self._watching[worker_id] -= 1
        self.metrics.watchers.set(self._watching.total())
        if not self._watching[worker_id]:
            del self._watching[worker_id]
            self.metrics.hide(worker_id)


def _require_few(field: str, count: int) -> None:
    if count > MAX_PER_CALL:
        raise InvalidArgument(field, f"at most {MAX_PER_CALL} per call, got {count}")


def _worker_id(worker_id: str) -> str:
    if not 1 <= len(worker_id) <= MAX_NAME_CHARS:
        raise InvalidArgument("worker_id", f"must have 1 to {MAX_NAME_CHARS} characters")
    return worker_id
