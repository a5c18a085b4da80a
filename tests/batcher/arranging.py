"""A batcher on a real socket, and a scheduler state with rounds that it arranges."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from grpc import aio
from prometheus_client import CollectorRegistry

from protos.generated import batcher_pb2, batcher_pb2_grpc
from services.batcher.config import BatcherConfig
from services.batcher.service import BatcherService
from services.forecast import Forecast
from services.policies.preset import Preset, choose
from services.policies.snapshot import Candidates
from services.runtime.codecs.arrange import (
    SentForecasts,
    encode_candidates,
)
from services.runtime.tasks import background
from services.scheduler.core import events as ev
from services.scheduler.core.state import SchedulerState
from services.scheduler.links.batcher import BatcherLink
from services.scheduler.observe.metrics import SchedulerMetrics
from tests.batcher.recorded_load import RecordedStep
from tests.policies.made_snapshots import candidates, jobs, node, table
from tests.reach import reaching, until

NAME = "foretoken.v1.Batcher"
ADD = batcher_pb2_grpc.add_BatcherServicer_to_server
PATIENT_S = 30.0  # a test machine may be busy
Answers = AsyncIterator[batcher_pb2.Arrangement]


def served(config: Mapping[str, Any], registry: CollectorRegistry | None = None) -> BatcherService:
    return BatcherService(BatcherConfig(**config), registry or CollectorRegistry())


class Apart:
    """A scheduler state with rounds that a BatcherLink arranges; it replays a recorded load."""

    def __init__(self, channel: aio.Channel, preset: Preset, timeout_s: float = PATIENT_S):
        self.state = SchedulerState(preset, apart=True)
        self.registry = CollectorRegistry()
        self.arranged: asyncio.Queue[ev.Arranged] = asyncio.Queue()
        self.arranger = BatcherLink(
            channel,
            preset,
            self.state.ledger.board.forecasts,
            timeout_s,
            SchedulerMetrics(self.registry),
            self.arranged.put_nowait,
        )

    def by(self, origin: str) -> int:
        """Rounds arranged by the batcher, or in process for this reason."""
        series = "foretoken_scheduler_rounds_arranged_total"
        return int(self.registry.get_sample_value(series, {"by": origin}) or 0)

    async def step(self, event: ev.Event, now: float) -> list[ev.Action]:
        actions = self.state.step(event, now)
        requests = [action for action in actions if isinstance(action, ev.AskArrange)]
        if not requests:
            return actions
        assert self.state.rounds.candidates is not None
        self.arranger.ask(self.state.rounds.candidates)
        async with asyncio.timeout(PATIENT_S):
            arranged = await self.arranged.get()
        rest = [action for action in actions if not isinstance(action, ev.AskArrange)]
        return rest + self.state.step(arranged, now)

    async def same_as(self, recorded: list[RecordedStep]) -> int:
        """Asserts that the replay gives the same actions; returns the number of rounds sent."""
        for event, now, actions in recorded:
            assert await self.step(event, now) == actions
        return sum(self.by(origin) for origin in ("batcher", "late", "gone", "wrong"))


@asynccontextmanager
async def apart(
    servicer: object, preset: str, timeout_s: float = PATIENT_S
) -> AsyncIterator[Apart]:
    async with reaching("socket", NAME, ADD, servicer) as channel:
        made = Apart(channel, choose(preset), timeout_s)
        async with background(made.arranger.run()):
            await until(lambda: made.arranger.connected)
            yield made


# Two waiting requests, and the service's answer


def two_wait() -> Candidates:
    made = jobs(2, forecast=[0, 1])
    return candidates(made, [False, False], node(), number=3)


FORECASTS = table(Forecast((5.0, 80.0), (0.5, 0.5), 100), Forecast((1.0, 9.0), (0.9, 0.1), 100))


def waiting_request() -> batcher_pb2.ArrangeMessage:
    return encode_candidates(two_wait(), SentForecasts(FORECASTS))


async def answer(
    *messages: batcher_pb2.ArrangeMessage, **config: int
) -> list[batcher_pb2.Arrangement]:
    async def sentence() -> AsyncIterator[batcher_pb2.ArrangeMessage]:
        for message in messages:
            yield message

    async with reaching("socket", NAME, ADD, served(config)) as channel:
        call = batcher_pb2_grpc.BatcherStub(channel).Arrange(sentence())
        return [each async for each in call]
