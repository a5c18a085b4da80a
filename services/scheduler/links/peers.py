"""The scheduler's links to the predictor and the estimator."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from grpc import aio

from protos.generated import predictor_pb2_grpc
from services.core import LiveAnswers, Outcome, Request
from services.scheduler.config import SchedulerConfig
from services.scheduler.core.events import Dispatch
from services.scheduler.links.cost_models import CostModels
from services.scheduler.links.forecasts import Forecasts
from services.scheduler.links.outcomes import Outcomes
from services.scheduler.observe.metrics import SchedulerMetrics


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
        metrics: SchedulerMetrics,
        dispatch: Dispatch,
        shared_representatives: Callable[[], Sequence[Request]],
        live_answers: Callable[[], Sequence[LiveAnswers]],
        traceparent: Callable[[str], str] = lambda _: "",
    ):
        predictor = predictor_pb2_grpc.PredictorStub(channels.predictor)
        self.forecasts = Forecasts(
            config, predictor, metrics, dispatch, shared_representatives, traceparent
        )
        self.outcomes = Outcomes(
            config.refresh_interval_s, predictor, live_answers, self.forecasts.refresh, metrics
        )
        self.cost_models = CostModels(channels.estimator, metrics, dispatch)

    def learn(self, outcome: Outcome) -> None:
        self.forecasts.learn(outcome)
        self.outcomes.learn(outcome)

    async def run(self) -> None:
        """Talks to both services until cancelled. Neither one's absence ends it."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.forecasts.run())
            tasks.create_task(self.outcomes.run())
            tasks.create_task(self.cost_models.run())
