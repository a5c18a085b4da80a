"""The scheduler's questions to predictor, batcher and estimator, none of which may hold it up.

The predictor has a short deadline, then history stands in. The estimator is only listened to.
The batcher is on the serving path: a round it fails is asked again after a pause.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import grpc
from grpc import aio

from protos import (
    batcher_pb2_grpc,
    common_pb2,
    estimator_pb2,
    estimator_pb2_grpc,
    predictor_pb2,
    predictor_pb2_grpc,
)
from services.core import Outcome, Request
from services.forecast import Forecast
from services.runtime.codec import decode_cost_model, decode_forecast, encode_outcome
from services.runtime.config import ConfigError
from services.scheduler import events as ev
from services.scheduler.codec import decode_batch, encode_forecast_input, encode_problem
from services.scheduler.config import SchedulerConfig
from services.scheduler.fallback import History
from services.scheduler.metrics import SchedulerMetrics
from services.scheduler.state import SchedulerState

log = logging.getLogger(__name__)
T = TypeVar("T")

MOST_PER_CALL = 1_024  # what one Forecast or Observe message carries
MOST_PENDING = 65_536  # outcomes and timings kept for a service that is away; then the oldest go
PAUSE_S = 0.1


@dataclass(frozen=True)
class Advisers:
    """Channels to the services that advise the scheduler."""

    predictor: aio.Channel
    batcher: aio.Channel
    estimator: aio.Channel


class Owner(Protocol):
    """What advice needs of the service it belongs to."""

    state: SchedulerState
    metrics: SchedulerMetrics

    def dispatch(self, event: ev.Event) -> None: ...


class Advice:
    """Gathers questions as the state asks them; `run` puts them and dispatches the answers."""

    def __init__(self, config: SchedulerConfig, advisers: Advisers, owner: Owner):
        self._config = config
        self._owner = owner
        self._predictor = predictor_pb2_grpc.PredictorStub(advisers.predictor)
        self._batcher = batcher_pb2_grpc.BatcherStub(advisers.batcher)
        self._estimator = estimator_pb2_grpc.EstimatorStub(advisers.estimator)
        self._history = History()
        self._texts: OrderedDict[str, common_pb2.PromptText] = OrderedDict()
        # Bounded by the state: one question a waiting request, one round under way.
        self._requests: asyncio.Queue[Request] = asyncio.Queue()
        self._problems: asyncio.Queue[ev.AskBatch] = asyncio.Queue()
        self._outcomes: asyncio.Queue[Outcome] = asyncio.Queue(MOST_PENDING)
        self._timings: asyncio.Queue[estimator_pb2.ObserveTimingsRequest] = asyncio.Queue(
            MOST_PENDING
        )
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._version = 0

    # What the state's actions call; none of these waits

    def keep_text(self, request_id: str, text: common_pb2.PromptText) -> None:
        """Hold a prompt's text until its forecast is asked; dropped right after."""
        self._texts[request_id] = text
        while len(self._texts) > MOST_PENDING:
            self._texts.popitem(last=False)

    def ask_forecast(self, action: ev.AskForecast) -> None:
        for request in action.requests:
            self._requests.put_nowait(request)

    def ask_batch(self, action: ev.AskBatch) -> None:
        self._problems.put_nowait(action)

    def learn(self, action: ev.Learn) -> None:
        self._history.learn(action.outcome)
        _put_bounded(self._outcomes, action.outcome)

    def observe(
        self,
        worker_id: str,
        timings: Sequence[common_pb2.StepTiming],
        swaps: Sequence[common_pb2.SwapTiming] = (),
    ) -> None:
        if timings or swaps:
            message = estimator_pb2.ObserveTimingsRequest(
                worker_id=worker_id, timings=timings[-MOST_PER_CALL:], swaps=swaps[-MOST_PER_CALL:]
            )
            _put_bounded(self._timings, message)

    def unwatch(self, worker_id: str) -> None:
        """A worker has left. Should it return, it is watched anew, and its model comes at once."""
        if watch := self._watches.pop(worker_id, None):
            watch.cancel()

    # The loops

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._forecast_loop())
            tasks.create_task(self._batch_loop())
            tasks.create_task(self._outcome_loop())
            tasks.create_task(self._timing_loop(tasks))

    async def _forecast_loop(self) -> None:
        while True:
            requests = await _take(self._requests, MOST_PER_CALL)
            forecasts = await self._forecasts(requests)
            pairs = zip((r.request_id for r in requests), forecasts, strict=True)
            self._owner.dispatch(ev.Forecasted(tuple(pairs)))

    async def _forecasts(self, requests: Sequence[Request]) -> list[Forecast]:
        """The predictor's answer, or history's where it is late, gone or wrong."""
        inputs = [encode_forecast_input(r, self._texts.pop(r.request_id, None)) for r in requests]
        message = predictor_pb2.ForecastRequest(inputs=inputs)
        try:
            answer = await self._predictor.Forecast(
                message, timeout=self._config.forecast_timeout_s
            )
            if len(answer.forecasts) != len(requests):
                raise ValueError(f"{len(answer.forecasts)} forecasts for {len(requests)} requests")
            pairs = zip(answer.forecasts, requests, strict=True)
            return [decode_forecast(forecast, r.max_tokens) for forecast, r in pairs]
        except (aio.AioRpcError, ValueError) as error:
            self._owner.metrics.fallbacks.inc(len(requests))
            log.warning("no forecast (%s); history stands in", _sentence(error))
            return [self._history.forecast(r) for r in requests]

    async def _batch_loop(self) -> None:
        while True:
            problem = await self._problems.get()
            with self._owner.metrics.round_seconds.time():
                batches = await self._batches(problem)
            self._owner.dispatch(ev.Formed(problem.round, batches))

    async def _batches(self, problem: ev.AskBatch) -> tuple[ev.Batch, ...]:
        try:
            answer = await self._batcher.Form(
                encode_problem(problem), timeout=self._config.batch_timeout_s
            )
            return tuple(decode_batch(b) for b in answer.batches)
        except aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.INVALID_ARGUMENT:  # it will be no better next time
                raise ConfigError(f"the batcher refuses the preset: {error.details()}") from None
            log.warning("batcher: %s; the round is asked again", _sentence(error))
            await asyncio.sleep(PAUSE_S)
            return ()

    async def _outcome_loop(self) -> None:
        """Teach the predictor, and renew the forecasts that whole populations share."""
        while True:
            outcomes = await _take(self._outcomes, MOST_PER_CALL)
            message = predictor_pb2.ObserveOutcomesRequest(
                outcomes=[encode_outcome(o) for o in outcomes]
            )
            try:
                answer = await self._predictor.Observe(message, timeout=PAUSE_S * 10)
                if answer.version != self._version:
                    self._version = answer.version
                    await self._refresh()
            except aio.AioRpcError as error:
                log.warning("predictor does not learn: %s", _sentence(error))
            await asyncio.sleep(self._config.refresh_interval_s)

    async def _refresh(self) -> None:
        requests = self._owner.state.shared_representatives()
        if requests:
            forecasts = await self._forecasts(requests[:MOST_PER_CALL])
            self._owner.dispatch(ev.Refreshed(tuple(f for f in forecasts if f.shared_key)))

    async def _timing_loop(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            message = await self._timings.get()
            try:
                await self._estimator.Observe(message, timeout=PAUSE_S * 10)
            except aio.AioRpcError as error:
                log.warning("estimator does not learn: %s", _sentence(error))
                await asyncio.sleep(PAUSE_S)
            worker_id = message.worker_id
            if worker_id not in self._watches and worker_id in self._owner.state.workers:
                self._watches[worker_id] = tasks.create_task(self._watch(worker_id))

    async def _watch(self, worker_id: str) -> None:
        """Follow a worker's cost model; while the estimator is away the last one stays."""
        request = estimator_pb2.GetCostModelRequest(worker_id=worker_id)
        while True:
            try:
                async for model in self._estimator.WatchCostModel(request):
                    self._owner.dispatch(ev.Costed(worker_id, decode_cost_model(model)))
            except aio.AioRpcError as error:
                log.info("cost model of %s: %s; asking again", worker_id, _sentence(error))
            await asyncio.sleep(PAUSE_S * 10)


async def _take(queue: asyncio.Queue[T], most: int) -> list[T]:
    """Wait for one item, then take all that came with it."""
    items = [await queue.get()]
    while len(items) < most and not queue.empty():
        items.append(queue.get_nowait())
    return items


def _put_bounded(queue: asyncio.Queue[T], item: T) -> None:
    """The oldest makes room."""
    if queue.full():
        queue.get_nowait()
    queue.put_nowait(item)


def _sentence(error: Exception) -> str:
    if isinstance(error, aio.AioRpcError):
        code: grpc.StatusCode = error.code()
        return f"{code.name}: {error.details()}"
    return str(error)
