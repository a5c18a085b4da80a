"""The scheduler's links to the predictor and the estimator."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from grpc import aio

from protos.generated import predictor_pb2_grpc
from services.core import Outcome
from services.scheduler.config import SchedulerConfig
from services.scheduler.links.cost_models import CostModels
from services.scheduler.links.delivery import LinkOwner
from services.scheduler.links.forecasts import Forecasts
from services.scheduler.links.outcomes import Outcomes


@dataclass(frozen=True)
class PeerChannels:
    predictor: aio.Channel
    estimator: aio.Channel


class PeerServices:
    """Only `run` waits; everything else returns at once, and answers are dispatched as events."""

    def __init__(
        self,
        config: SchedulerConfig,
        channels: PeerChannels,
        owner: LinkOwner,
        traceparent: Callable[[str], str] = lambda _: "",
    ):
        """`traceparent` gives the parent of a request's forecast spans; empty if untraced."""
        predictor = predictor_pb2_grpc.PredictorStub(channels.predictor)
        self.forecasts = Forecasts(config, predictor, owner, traceparent)
        self.outcomes = Outcomes(
            config.refresh_interval_s, predictor, self.forecasts.refresh, owner
        )
        self.cost_models = CostModels(channels.estimator, owner)

    def learn(self, outcome: Outcome) -> None:
        self.forecasts.learn(outcome)
        self.outcomes.learn(outcome)

    async def run(self) -> None:
        """Talk to both services until cancelled. Neither one's absence ends it."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.forecasts.run())
            tasks.create_task(self.outcomes.run())
            tasks.create_task(self.cost_models.run())
