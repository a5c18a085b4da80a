"""Finished requests told to the predictor, and shared forecasts renewed by what it learnt."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from protos.generated import predictor_pb2, predictor_pb2_grpc
from services.core import Outcome
from services.runtime.codecs.common import encode_outcome
from services.scheduler.links.delivery import Backlog, deliver
from services.scheduler.links.interface import MOST_KEPT, MOST_PER_CALL, Owner

OBSERVE_S = 5.0  # nobody waits for it, and what was learnt twice would count twice
NEVER = -1  # no version has been seen


class Outcomes:
    """Every outcome is told, once and in order, however long the predictor is away.

    `refresh` renews the shared forecasts; whether it could.
    """

    def __init__(
        self,
        interval_s: float,
        predictor: "predictor_pb2_grpc.PredictorAsyncStub",
        refresh: Callable[[], Awaitable[bool]],
        owner: Owner,
    ):
        self._interval_s = interval_s
        self._predictor = predictor
        self._refresh = refresh
        dropped = owner.metrics.advice_dropped.labels("outcome")
        self._backlog: Backlog[Outcome] = Backlog(MOST_KEPT, dropped)
        self._version = NEVER
        self._all_told = asyncio.Event()
        self._all_told.set()

    def learn(self, outcome: Outcome) -> None:
        self._all_told.clear()
        self._backlog.put(outcome)

    async def told(self) -> None:
        """Return once there is nothing left to tell."""
        await self._all_told.wait()

    async def run(self) -> None:
        while True:
            outcomes = await self._backlog.take(MOST_PER_CALL)
            message = predictor_pb2.ObserveOutcomesRequest(
                outcomes=[encode_outcome(o) for o in outcomes]
            )
            answer = await deliver(partial(self._observe, message), "outcomes to the predictor")
            if not self._backlog:
                self._all_told.set()
            if answer and answer.version != self._version and await self._refresh():
                self._version = answer.version
            await asyncio.sleep(self._interval_s)

    async def _observe(
        self, message: predictor_pb2.ObserveOutcomesRequest
    ) -> predictor_pb2.ObserveOutcomesResponse:
        return await self._predictor.Observe(message, timeout=OBSERVE_S)
