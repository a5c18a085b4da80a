"""Runs the requests of an offline job: read ahead, longest first, a bounded number at a time.

A long answer that begins last runs alone at the end of the job, on a machine that could run
hundreds beside it (LPT rule: Graham, Bounds on Multiprocessing Timing Anomalies, SIAM Journal on
Applied Mathematics 17(2), 1969).
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from itertools import islice
from typing import Generic, Self, TypeVar

from grpc import aio

from foretoken.offline.forecasts import expected_tokens
from foretoken.running.inprocess import RunningSystem
from gateway.faces.http.offline.requests import (
    Chunks,
    PreparedRequest,
    Urgency,
    answer,
    prepare,
    retry_refused,
)
from gateway.faces.http.schema import Json
from gateway.front import Front
from gateway.sessions.call import ClientCall
from gateway.types.sla_classes import find_loosest
from services.runtime.errors import ServiceError

T = TypeVar("T")
IN_FLIGHT = 256  # the most that common engines run at a time
READ_AT_ONCE = 64  # requests that are tokenized and forecast together
PATIENCE_S = 600.0  # for a request that the system is too busy for


@dataclass(frozen=True)
class OfflineRequest:
    """A body and the endpoint that reads it. `id` is unique in the job, `name` is for errors."""

    id: str
    name: str
    url: str
    fields: Json


@dataclass(frozen=True)
class Handlers(Generic[T]):
    """What a job does with its answers. An exception of `on_fault` ends the job."""

    encode: Callable[[PreparedRequest, ClientCall, Chunks], T]
    on_answer: Callable[[OfflineRequest, T], None]
    on_fault: Callable[[OfflineRequest, ServiceError], None]
    on_read: Callable[[int], None]  # receives the number of requests read so far


@dataclass(frozen=True)
class JobRunner:
    """At most `in_flight` requests run at a time, and at most `window` are read ahead. Without
    `by_forecast` they begin in the given order."""

    front: Front
    predictor: aio.Channel
    urgency: Urgency
    in_flight: int
    by_forecast: bool

    @classmethod
    def for_system(cls, system: RunningSystem, in_flight: int, by_forecast: bool) -> Self:
        """The runner of a system that serves nothing else."""
        front = system.control.front
        urgency = Urgency(find_loosest(front.config.slas))
        return cls(front, system.predictor, urgency, in_flight, by_forecast)

    async def run(
        self, requests: Iterator[OfflineRequest], window: int, handlers: Handlers[T]
    ) -> None:
        """Answers each request once, or reports its fault."""
        queue = _ReadAhead(self, requests, window, handlers)
        async with asyncio.TaskGroup() as group:
            for _ in range(self.in_flight):
                group.create_task(_work(queue, handlers))


async def _work(queue: "_ReadAhead[T]", handlers: Handlers[T]) -> None:
    while (taken := await queue.take()) is not None:
        request, prepared = taken
        attempt = partial(answer, prepared, partial(handlers.encode, prepared))
        try:
            answered = await retry_refused(attempt, PATIENCE_S)
        except ServiceError as error:
            handlers.on_fault(request, error)
        else:
            handlers.on_answer(request, answered)


class _ReadAhead(Generic[T]):
    """The next requests of a source, the longest expected answer first, equal ones as given."""

    def __init__(
        self,
        runner: JobRunner,
        source: Iterator[OfflineRequest],
        window: int,
        handlers: Handlers[T],
    ):
        self._runner, self._source, self._window = runner, source, window
        self._handlers = handlers
        self._heap: list[tuple[float, int, OfflineRequest, PreparedRequest]] = []
        self._read = 0
        self._ended = False
        self._turn = asyncio.Lock()

    async def take(self) -> tuple[OfflineRequest, PreparedRequest] | None:
        """The next request; None at the end. O(log window)."""
        async with self._turn:
            while not self._ended and len(self._heap) < self._window:
                await self._fill()
        if not self._heap:
            return None
        _, _, request, prepared = heappop(self._heap)
        return request, prepared

    async def _fill(self) -> None:
        part = list(islice(self._source, min(READ_AT_ONCE, self._window)))
        self._ended = not part
        async with asyncio.TaskGroup() as group:
            reading = [group.create_task(self._prepare(request)) for request in part]
        prepared = [(request, task.result()) for request, task in zip(part, reading, strict=True)]
        found = [(request, each) for request, each in prepared if each is not None]
        expected = await self._expect([each for _, each in found])
        for (request, each), tokens in zip(found, expected, strict=True):
            self._read += 1
            heappush(self._heap, (-tokens, self._read, request, each))
        self._handlers.on_read(self._read)

    async def _prepare(self, request: OfflineRequest) -> PreparedRequest | None:
        runner = self._runner
        try:
            attempt = partial(prepare, runner.front, request.url, request.fields, runner.urgency)
            return await retry_refused(attempt, PATIENCE_S)
        except ServiceError as error:
            self._handlers.on_fault(request, error)
            return None

    async def _expect(self, prepared: Sequence[PreparedRequest]) -> Sequence[float]:
        if not self._runner.by_forecast:
            return [0.0] * len(prepared)
        prompts = [each.prompts[0] for each in prepared]
        return await expected_tokens(self._runner.predictor, prompts)
