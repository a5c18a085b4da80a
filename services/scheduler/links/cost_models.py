"""Sends workers' timings to the estimator, and follows the cost models that it fits."""

import asyncio
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import grpc
from grpc import aio

from protos.generated import common_pb2, estimator_pb2, estimator_pb2_grpc
from services.costs import BatchTiming, CostModel, is_possible_s
from services.runtime.codecs.common import decode_cost_model, encode_batch
from services.runtime.network.delivery import (
    MAX_PER_CALL,
    Backlog,
    deliver,
    follow,
)
from services.runtime.network.streams import ResponseStream
from services.scheduler.core import events as ev
from services.scheduler.observe.metrics import SchedulerMetrics

log = logging.getLogger(__name__)

MAX_WAITING = 8_192  # timing messages of about 20 timings; a minute or two of a large fleet
OBSERVE_S = 5.0
GATHER_S = 0.2  # between deliveries: one call per report costs as much as a round


@dataclass
class FollowedWorker:
    """A worker with a cost model to follow once its start-up profile has been delivered."""

    profile: estimator_pb2.ObserveTimingsRequest
    task: asyncio.Task[None] | None = None


class CostModels:
    """Keeps each worker's start-up profile and sends it again to an estimator that does not know
    the worker: only the profile has steps of every kind."""

    def __init__(self, estimator: aio.Channel, metrics: SchedulerMetrics, dispatch: ev.Dispatch):
        self._estimator = estimator_pb2_grpc.EstimatorStub(estimator)
        self._dispatch = dispatch
        self._workers: dict[str, FollowedWorker] = {}  # the attached ones
        dropped = metrics.advice_dropped.labels("timings")
        self._backlog: Backlog[estimator_pb2.ObserveTimingsRequest] = Backlog(MAX_WAITING, dropped)

    def observe(
        self,
        worker_id: str,
        timings: Sequence[common_pb2.StepTiming],
        swaps: Sequence[common_pb2.SwapTiming] = (),
    ) -> None:
        """Sends a worker's timings; the first ones after it attached are its start-up profile."""
        message = estimator_pb2.ObserveTimingsRequest(
            worker_id=worker_id, timings=timings[-MAX_PER_CALL:], swaps=swaps[-MAX_PER_CALL:]
        )
        first = worker_id not in self._workers
        if first:
            self._workers[worker_id] = FollowedWorker(message)
        if first or timings or swaps:
            self._backlog.put(message)

    def observe_batch(self, worker_id: str, batch: BatchTiming) -> None:
        """Sends the timing of a static batch that has ended at an attached worker."""
        if worker_id in self._workers:
            self._backlog.put(
                estimator_pb2.ObserveTimingsRequest(
                    worker_id=worker_id, batches=[encode_batch(batch)]
                )
            )

    def forget_worker(self, worker_id: str) -> None:
        """Stops following a worker that left. If it returns, its model arrives again at once."""
        worker = self._workers.pop(worker_id, None)
        if worker and worker.task:
            worker.task.cancel()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            while True:
                for message in merged(await self._backlog.pop(MAX_WAITING)):
                    what = f"timings of {message.worker_id} to the estimator"
                    send = partial(self._estimator.Observe, message, timeout=OBSERVE_S)
                    await deliver(send, what)
                    worker = self._workers.get(message.worker_id)
                    if worker and not worker.task:
                        following = self._follow(message.worker_id, worker.profile)
                        worker.task = tasks.create_task(following)
                await asyncio.sleep(GATHER_S)

    async def _follow(self, worker_id: str, profile: estimator_pb2.ObserveTimingsRequest) -> None:
        """Applies each newer model; while the estimator is away the last one stays in use."""
        request = estimator_pb2.GetCostModelRequest(worker_id=worker_id)

        async def open_stream() -> ResponseStream[estimator_pb2.CostModel]:
            await self._introduce(request, profile)
            return self._estimator.WatchCostModel(request)

        what = f"cost model of {worker_id}"
        await follow(open_stream, partial(self._apply, worker_id), what)

    async def _introduce(
        self,
        request: estimator_pb2.GetCostModelRequest,
        profile: estimator_pb2.ObserveTimingsRequest,
    ) -> None:
        """Sends the profile if the estimator does not know the worker. Raises AioRpcError."""
        try:
            await self._estimator.GetCostModel(request, timeout=OBSERVE_S)
        except aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.NOT_FOUND:
                raise
            await self._estimator.Observe(profile, timeout=OBSERVE_S)

    def _apply(self, worker_id: str, message: estimator_pb2.CostModel) -> None:
        """Versions are ignored: a restarted estimator counts from 1 again."""
        try:
            model = decode_cost_model(message)
        except ValueError as error:
            log.warning("the cost model of %s is invalid and ignored: %s", worker_id, error)
            return
        if _is_plausible(model):
            self._dispatch(ev.Costed(worker_id, model))
        else:
            log.warning("the cost model of %s is implausible and ignored: %s", worker_id, model)


def merged(
    messages: Sequence[estimator_pb2.ObserveTimingsRequest],
) -> Iterator[estimator_pb2.ObserveTimingsRequest]:
    """The messages of each worker in as few as MAX_PER_CALL allows, in their order. Does not change
    a message."""
    by_worker: dict[str, estimator_pb2.ObserveTimingsRequest] = {}
    for message in messages:
        name = message.worker_id
        before = by_worker.get(name)
        if before is not None and _fit(before, message):
            before.MergeFrom(message)
            continue
        if before is not None:
            yield before
        by_worker[name] = estimator_pb2.ObserveTimingsRequest()
        by_worker[name].CopyFrom(message)
    yield from by_worker.values()


def _fit(
    first: estimator_pb2.ObserveTimingsRequest, second: estimator_pb2.ObserveTimingsRequest
) -> bool:
    return all(
        len(getattr(first, name)) + len(getattr(second, name)) <= MAX_PER_CALL
        for name in ("timings", "swaps", "batches")
    )


def _is_plausible(model: CostModel) -> bool:
    """Each time is possible, and prefill takes time."""
    times = (
        model.base_s, model.prefill_token_s, model.decode_seq_s, model.context_token_s,
        model.offload_token_s, model.upload_token_s, model.quantize_token_s,
    )  # fmt: skip
    return all(map(is_possible_s, times)) and model.prefill_token_s > 0
