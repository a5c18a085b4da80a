"""Timings told to the estimator, and the cost models that it makes of them."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite

import grpc
from grpc import aio

from protos.generated import common_pb2, estimator_pb2, estimator_pb2_grpc
from services.costs import BatchTiming, CostModel
from services.runtime.codecs.common import decode_cost_model, encode_batch
from services.scheduler.core import events as ev
from services.scheduler.links.delivery import RETRIES, Backlog, deliver
from services.scheduler.links.interface import MOST_PER_CALL, Owner, sentence

log = logging.getLogger(__name__)

MOST_WAITING = 8_192  # reports' timings, some 20 each; a minute or two of a large fleet
OBSERVE_S = 5.0


@dataclass
class Watched:
    """A worker whose cost model is followed, once its start-up profile has been told."""

    profile: estimator_pb2.ObserveTimingsRequest
    watch: asyncio.Task[None] | None = None


class Costs:
    """What is observed first of a worker is its start-up profile: it is kept, and told again to
    an estimator that does not know the worker, since it alone has steps of every kind."""

    def __init__(self, estimator: aio.Channel, owner: Owner):
        self._estimator = estimator_pb2_grpc.EstimatorStub(estimator)
        self._owner = owner
        self._workers: dict[str, Watched] = {}  # as many as are attached
        dropped = owner.metrics.advice_dropped.labels("timings")
        self._backlog: Backlog[estimator_pb2.ObserveTimingsRequest] = Backlog(MOST_WAITING, dropped)

    def observe(
        self,
        worker_id: str,
        timings: Sequence[common_pb2.StepTiming],
        swaps: Sequence[common_pb2.SwapTiming],
    ) -> None:
        message = estimator_pb2.ObserveTimingsRequest(
            worker_id=worker_id, timings=timings[-MOST_PER_CALL:], swaps=swaps[-MOST_PER_CALL:]
        )
        first = worker_id not in self._workers
        if first:
            self._workers[worker_id] = Watched(message)
        if first or timings or swaps:
            self._backlog.put(message)

    def observe_batch(self, worker_id: str, batch: BatchTiming) -> None:
        """A static batch that has ended there; of a worker that has not introduced itself, or has
        left, it is not told."""
        if worker_id in self._workers:
            self._backlog.put(
                estimator_pb2.ObserveTimingsRequest(
                    worker_id=worker_id, batches=[encode_batch(batch)]
                )
            )

    def unwatch(self, worker_id: str) -> None:
        """It has left. Should it return, it is watched anew, and its model comes at once."""
        watched = self._workers.pop(worker_id, None)
        if watched and watched.watch:
            watched.watch.cancel()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            while True:
                [message] = await self._backlog.take(1)
                what = f"timings of {message.worker_id} to the estimator"
                await deliver(partial(self._observe, message), what)
                watched = self._workers.get(message.worker_id)
                if watched and not watched.watch:
                    work = self._follow(message.worker_id, watched.profile)
                    watched.watch = tasks.create_task(work)

    async def _observe(
        self, message: estimator_pb2.ObserveTimingsRequest
    ) -> estimator_pb2.ObserveTimingsResponse:
        return await self._estimator.Observe(message, timeout=OBSERVE_S)

    async def _follow(self, worker_id: str, profile: estimator_pb2.ObserveTimingsRequest) -> None:
        """Take each newer model; while the estimator is away the last one stays."""
        request = estimator_pb2.GetCostModelRequest(worker_id=worker_id)
        failures = 0
        while True:
            try:
                await self._introduce(request, profile)
                async for message in self._estimator.WatchCostModel(request):
                    failures = 0
                    self._take(worker_id, message)
            except aio.AioRpcError as error:
                log.info("cost model of %s: %s; asking again", worker_id, sentence(error))
            await asyncio.sleep(RETRIES.after_s(failures))
            failures += 1

    async def _introduce(
        self,
        request: estimator_pb2.GetCostModelRequest,
        profile: estimator_pb2.ObserveTimingsRequest,
    ) -> None:
        """Tell the profile where no model of the worker is known. Raises AioRpcError."""
        try:
            await self._estimator.GetCostModel(request, timeout=OBSERVE_S)
        except aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.NOT_FOUND:
                raise
            await self._observe(profile)

    def _take(self, worker_id: str, message: estimator_pb2.CostModel) -> None:
        """Whatever its version: an estimator that was restarted counts from 1 again."""
        try:
            model = decode_cost_model(message)
        except ValueError as error:
            log.warning("no cost model of %s: %s", worker_id, error)
            return
        if _is_sound(model):
            self._owner.dispatch(ev.Costed(worker_id, model))
        else:
            log.warning("no cost model of %s can be %s", worker_id, model)


def _is_sound(model: CostModel) -> bool:
    """No time below zero or beyond measure, and reading a prompt takes some."""
    times = (
        model.base_s, model.prefill_token_s, model.decode_seq_s, model.context_token_s,
        model.offload_token_s, model.upload_token_s, model.quantize_token_s,
    )  # fmt: skip
    return all(isfinite(t) and t >= 0 for t in times) and model.prefill_token_s > 0
