"""The scheduler's links to the predictor and the estimator."""

import asyncio
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

from grpc import aio

from protos.generated import predictor_pb2_grpc
from services.core import LiveAnswers, Outcome, Request
from services.scheduler.config import SchedulerConfig
from services.scheduler.core import events as ev
from services.scheduler.core.phases import RequestPhase
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
        dispatch: ev.Dispatch,
        shared_representatives: Callable[[], Sequence[Request]],
        live_answers: Callable[[], Sequence[LiveAnswers]],
        traceparent: Callable[[str], str] = lambda _: "",
    ):
        predictor = predictor_pb2_grpc.PredictorStub(channels.predictor)
        self.forecasts = Forecasts(
            config, predictor, metrics, dispatch, shared_representatives, traceparent
        )
        self.outcomes = Outcomes(
            config.refresh_interval_s,
            predictor,
            live_answers,
            self.forecasts.refresh,
            metrics,
            config.reporter,
        )
        self.cost_models = CostModels(channels.estimator, metrics, dispatch)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What does not work at these services, although requests are served."""
        return (self.forecasts.warning,) if self.forecasts.warning else ()

    def learn(self, outcome: Outcome) -> None:
        self.forecasts.learn(outcome)
        self.outcomes.put(outcome)

    def forget_ended(self, step: ev.Step, live: Container[str]) -> None:
        """Drops what is kept for the forecasts of requests that have ended, here and, without an
        outcome, at the predictor; what a later request of the id needs stays. O(transitions)."""
        none = RequestPhase.NONE
        ended = [t for t in step.transitions if t.after is none and t.request_id not in live]
        if not ended:
            return
        learned = {a.outcome.request_id for a in step.actions if isinstance(a, ev.Learn)}
        for transition in ended:
            self.forecasts.forget(transition.request_id)
            if transition.before is not none and transition.request_id not in learned:
                self.outcomes.put(transition.request_id)

    async def run(self) -> None:
        """Talks to both services until cancelled. Neither one's absence ends it."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.forecasts.run())
            tasks.create_task(self.outcomes.run())
            tasks.create_task(self.cost_models.run())
