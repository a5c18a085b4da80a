"""PeerServices with an owner that records events, and a scripted predictor."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
from prometheus_client import CollectorRegistry

from protos.generated import common_pb2, estimator_pb2_grpc, predictor_pb2, predictor_pb2_grpc
from services.core import FinishReason, LiveAnswers, Outcome, Request
from services.forecast import Forecast
from services.runtime.codecs.common import decode_live_answers
from services.runtime.errors import ServiceError
from services.runtime.network.channel import connect
from services.runtime.server import Mount, listening
from services.runtime.tasks import background
from services.scheduler.config import SchedulerConfig
from services.scheduler.core import events as ev
from services.scheduler.links.peers import PeerChannels, PeerServices
from services.scheduler.observe.metrics import SchedulerMetrics

NO_SERVER = "unix:/no/such/socket"
# Settings with long timeouts, because a test machine may be busy.
PATIENT: dict[str, Any] = {"forecast_timeout_s": 5.0, "forecast_late_s": 10.0}


class Owner:
    """Stands for the scheduler: keeps every dispatched event, in order."""

    def __init__(self) -> None:
        self.shared: list[Request] = []  # representatives of population forecasts
        self.live: list[LiveAnswers] = []
        self.registry = CollectorRegistry()
        self.metrics = SchedulerMetrics(self.registry)
        self.events: list[ev.Event] = []

    def dispatch(self, event: ev.Event) -> None:
        self.events.append(event)

    def value(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"foretoken_{name}", labels) or 0.0

    def forecasts(self, request_id: str) -> list[Forecast]:
        """All forecasts of a request, in order."""
        forecasted = [e for e in self.events if isinstance(e, ev.Forecasted)]
        return [f for e in forecasted for name, f in e.forecasts if name == request_id]

    def sources(self, request_id: str) -> list[str]:
        return [f.source for f in self.forecasts(request_id)]

    def has(self, request_id: str, sources: list[str]) -> bool:
        return self.sources(request_id) == sources


class FakePredictor(predictor_pb2_grpc.PredictorServicer):
    """Forecasts `tokens` for every request once `free` is set, and records calls and outcomes."""

    def __init__(self, tokens: float = 40.0, shared_key: str = "") -> None:
        self.free = asyncio.Event()
        self.free.set()
        self.answer = common_pb2.Forecast(points=[tokens], source="model", shared_key=shared_key)
        self.calls: list[list[predictor_pb2.ForecastInput]] = []
        self.outcomes: list[str] = []
        self.ended: list[str] = []  # without an outcome
        self.reporters: set[str] = set()
        self.live: list[LiveAnswers] = []  # of the last Observe
        self.version = 0
        self.refusals: list[ServiceError] = []  # of the next calls
        self.followers: list[asyncio.Queue[predictor_pb2.ImprovedForecasts]] = []

    async def Forecast(
        self, request: predictor_pb2.ForecastRequest, context: Any
    ) -> predictor_pb2.ForecastResponse:
        self.calls.append(list(request.inputs))
        if self.refusals:
            raise self.refusals.pop(0)
        await self.free.wait()
        return predictor_pb2.ForecastResponse(forecasts=[self.answer] * len(request.inputs))

    async def Observe(
        self, request: predictor_pb2.ObserveOutcomesRequest, context: Any
    ) -> predictor_pb2.ObserveOutcomesResponse:
        self.outcomes += [o.request_id for o in request.outcomes]
        self.ended += request.ended_ids
        self.reporters.add(request.reporter)
        self.live = [decode_live_answers(message) for message in request.live]
        return predictor_pb2.ObserveOutcomesResponse(version=self.version)

    async def Improve(
        self, request: predictor_pb2.ImproveRequest, context: Any
    ) -> AsyncIterator[predictor_pb2.ImprovedForecasts]:
        follower: asyncio.Queue[predictor_pb2.ImprovedForecasts] = asyncio.Queue()
        self.followers.append(follower)
        while True:
            yield await follower.get()

    def names(self) -> list[list[str]]:
        """The ids of the requests in each call."""
        return [[i.request_id for i in call] for call in self.calls]


def refusal(code: grpc.StatusCode) -> ServiceError:
    return ServiceError(code, "not this one")


@asynccontextmanager
async def running_peers(
    owner: Owner,
    predictor: str = NO_SERVER,
    estimator: str = NO_SERVER,
    traceparent: Callable[[str], str] = lambda _: "",
    **settings: Any,
) -> AsyncIterator[PeerServices]:
    """Running PeerServices that connect to these addresses, whether or not a server listens."""
    channels = [connect(address) for address in (predictor, estimator)]
    config = SchedulerConfig(**settings)
    try:
        peers = PeerServices(
            config,
            PeerChannels(*channels),
            owner.metrics,
            owner.dispatch,
            lambda: owner.shared,
            lambda: owner.live,
            traceparent,
        )
        async with background(peers.run()), asyncio.timeout(60):
            yield peers
    finally:
        for channel in channels:
            await channel.close()


@asynccontextmanager
async def predictor_at(address: str, servicer: object) -> AsyncIterator[None]:
    add = predictor_pb2_grpc.add_PredictorServicer_to_server
    async with listening([Mount("foretoken.v1.Predictor", add, servicer)], address):
        yield


@asynccontextmanager
async def estimator_at(address: str, servicer: object) -> AsyncIterator[None]:
    add = estimator_pb2_grpc.add_EstimatorServicer_to_server
    async with listening([Mount("foretoken.v1.Estimator", add, servicer)], address):
        yield


def socket_in(folder: Path) -> str:
    return f"unix:{folder}/s.sock"


def request(request_id: str, max_tokens: int = 100) -> Request:
    return Request(request_id, "demo", 10, max_tokens, 0.0)


def asking(*request_ids: str) -> tuple[Request, ...]:
    return tuple(request(r) for r in request_ids)


def learning(request_ids: Sequence[str], tokens: int = 7) -> list[Outcome]:
    return [Outcome(r, "demo", "", 10, tokens, 100, FinishReason.STOP, 1.0, 0) for r in request_ids]
