"""Sends the endings of requests to the predictor, and refreshes shared forecasts after it has
learned from them."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from protos.generated import predictor_pb2, predictor_pb2_grpc
from services.core import Ending, LiveAnswers
from services.runtime.codecs.common import encode_endings
from services.runtime.network.delivery import MAX_KEPT, MAX_PER_CALL, Backlog, deliver
from services.scheduler.observe.metrics import SchedulerMetrics

OBSERVE_S = 5.0  # long, because an outcome sent twice counts twice; no request waits for it
NO_VERSION = -1


class Outcomes:
    """Delivers every outcome once and in order, however long the predictor is away, and the ids of
    requests that ended without one: the predictor keeps a forecast of each live request.

    `live_answers` returns the answers that have not ended; they go with each call. `refresh` renews
    the shared forecasts and returns whether it succeeded.
    """

    def __init__(
        self,
        interval_s: float,
        predictor: "predictor_pb2_grpc.PredictorAsyncStub",
        live_answers: Callable[[], Sequence[LiveAnswers]],
        refresh: Callable[[], Awaitable[bool]],
        metrics: SchedulerMetrics,
        reporter: str,
    ):
        """`reporter`: the name of this process, which is stored with its outcomes."""
        self._interval_s = interval_s
        self._predictor = predictor
        self._live_answers = live_answers
        self._refresh = refresh
        self._reporter = reporter
        dropped = metrics.advice_dropped.labels("outcome")
        self._backlog: Backlog[Ending] = Backlog(MAX_KEPT, dropped)
        self._version = NO_VERSION
        self._delivered = asyncio.Event()
        self._delivered.set()

    def put(self, ending: Ending) -> None:
        self._delivered.clear()
        self._backlog.put(ending)

    async def wait_delivered(self) -> None:
        """Returns once every ending is delivered."""
        await self._delivered.wait()

    async def run(self) -> None:
        while True:
            send = partial(self._send, await self._backlog.pop(MAX_PER_CALL))
            answer = await deliver(send, "outcomes to the predictor")
            if not self._backlog:
                self._delivered.set()
            if answer and answer.version != self._version and await self._refresh():
                self._version = answer.version
            await asyncio.sleep(self._interval_s)

    def _send(self, endings: Sequence[Ending]) -> Awaitable[predictor_pb2.ObserveOutcomesResponse]:
        """One call, with the present live answers. A retry calls it again."""
        live = self._live_answers()[:MAX_PER_CALL]
        message = encode_endings(endings, self._reporter, live)
        return self._predictor.Observe(message, timeout=OBSERVE_S)
