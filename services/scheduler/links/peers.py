"""All that the scheduler asks of others, behind one face."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from grpc import aio

from protos.generated import common_pb2, predictor_pb2_grpc
from services.costs import BatchTiming
from services.scheduler.config import SchedulerConfig
from services.scheduler.core import events as ev
from services.scheduler.links.cost_models import Costs
from services.scheduler.links.forecasts import Forecasts
from services.scheduler.links.interface import Owner
from services.scheduler.links.outcomes import Outcomes


@dataclass(frozen=True)
class PeerChannels:
    """Channels to the services that advise the scheduler."""

    predictor: aio.Channel
    estimator: aio.Channel


class PeerServices:
    """Takes what the state asks and tells; `run` talks to the advisers and dispatches answers.

    Only `run` waits. No adviser's absence ends it.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        advisers: PeerChannels,
        owner: Owner,
        traceparent: Callable[[str], str] = lambda _: "",
    ):
        """`traceparent`: what a request's forecast is traced under; empty for nothing."""
        predictor = predictor_pb2_grpc.PredictorStub(advisers.predictor)
        self._forecasts = Forecasts(config, predictor, owner, traceparent)
        self._outcomes = Outcomes(
            config.refresh_interval_s, predictor, self._forecasts.refresh, owner
        )
        self._costs = Costs(advisers.estimator, owner)

    def keep_text(self, request_id: str, text: common_pb2.PromptText) -> None:
        """Hold a prompt's text until its forecast is asked."""
        self._forecasts.keep_text(request_id, text)

    def drop_text(self, request_id: str) -> None:
        """The request was refused or has ended: nothing of it is needed any more."""
        self._forecasts.forget(request_id)

    def ask_forecast(self, action: ev.AskForecast) -> None:
        self._forecasts.ask(action.requests)

    def learn(self, action: ev.Learn) -> None:
        self._forecasts.learn(action.outcome)
        self._outcomes.learn(action.outcome)

    def observe(
        self,
        worker_id: str,
        timings: Sequence[common_pb2.StepTiming],
        swaps: Sequence[common_pb2.SwapTiming] = (),
    ) -> None:
        """What a worker measured; first, once it has attached, its start-up profile."""
        self._costs.observe(worker_id, timings, swaps)

    def observe_batch(self, worker_id: str, batch: BatchTiming) -> None:
        """A static batch has ended at this worker, all of it."""
        self._costs.observe_batch(worker_id, batch)

    def unwatch(self, worker_id: str) -> None:
        self._costs.unwatch(worker_id)

    async def told(self) -> None:
        """Return once the predictor knows of every outcome."""
        await self._outcomes.told()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._forecasts.run())
            tasks.create_task(self._outcomes.run())
            tasks.create_task(self._costs.run())
