"""Rounds arranged by a batcher that is a process of its own.

One stream, kept open; on it each forecast crosses once in its life. A round whose answer is not
there in time, or that nobody can be asked about, is arranged at home: admission never stops
because a peer did. A batcher that is late or gone is left alone for a doubling while.
"""

import asyncio
import logging
from collections.abc import Callable
from math import inf

from grpc import aio

from protos import batcher_pb2, batcher_pb2_grpc
from services.forecast import ForecastTable
from services.policies.preset import Preset
from services.policies.snapshot import Contest
from services.runtime.arrange_codec import Telling, encode_contest, encode_hello
from services.runtime.streams import Outbox
from services.scheduler.codec import decode_arrangement
from services.scheduler.events import Arranged
from services.scheduler.metrics import SchedulerMetrics

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
MOST_QUEUED = 4  # rounds on their way: one, and what a slow reader has not taken yet


class Arranger:
    """Asks as the state does, `dispatch`es what is answered; `run` keeps the stream."""

    def __init__(
        self,
        channel: aio.Channel,
        preset: Preset,
        table: ForecastTable,
        timeout_s: float,
        metrics: SchedulerMetrics,
        dispatch: Callable[[Arranged], None],
    ):
        self._stub = batcher_pb2_grpc.BatcherStub(channel)
        self._preset = preset
        self._table = table
        self._timeout_s = timeout_s
        self._metrics = metrics
        self._dispatch = dispatch
        self._outbox: Outbox[batcher_pb2.ArrangeMessage] | None = None
        self._telling = Telling(table)
        self._asked = 0  # the round that is out
        self._timer: asyncio.TimerHandle | None = None

    def ask(self, contest: Contest) -> None:
        """Never waits: the answer, or that there is none, is dispatched later."""
        loop = asyncio.get_running_loop()
        self._asked = contest.round
        if self._outbox is None:
            loop.call_soon(self._give_up, contest.round, "gone")
            return
        self._outbox.put(encode_contest(contest, self._telling))
        self._timer = loop.call_later(self._timeout_s, self._give_up, contest.round, "late")

    async def run(self) -> None:
        """Until cancelled."""
        pause_s = FIRST_PAUSE_S
        while True:
            answered = await self._follow()
            pause_s = FIRST_PAUSE_S if answered else min(2 * pause_s, LONGEST_PAUSE_S)
            await asyncio.sleep(pause_s)

    async def _follow(self) -> bool:
        """One stream to its end; whether any round was answered on it."""
        outbox: Outbox[batcher_pb2.ArrangeMessage] = Outbox(MOST_QUEUED)
        outbox.put(encode_hello(self._preset))
        self._telling = Telling(self._table)
        call = self._stub.Arrange(aiter(outbox))
        answered = False
        try:
            await call.wait_for_connection()
            self._outbox = outbox
            async for arrangement in call:
                answered = True
                self._answered(arrangement)
        except aio.AioRpcError as error:
            log.warning("batcher: %s; rounds are arranged here", error.details())
        finally:
            self._outbox = None
            call.cancel()
            if self._timer:
                self._give_up(self._asked, "gone")
        return answered

    def _answered(self, arrangement: batcher_pb2.Arrangement) -> None:
        if arrangement.round != self._asked:
            return  # too late: it was arranged at home
        self._settle()
        self._metrics.arranged.labels("batcher").inc()
        self._dispatch(decode_arrangement(arrangement))

    def _give_up(self, number: int, why: str) -> None:
        """Arrange it at home. A stream that was late is cut, so that nothing piles up behind."""
        if number != self._asked:
            return
        self._settle()
        if why == "late" and self._outbox:
            log.warning("the batcher took over %g s for a round", self._timeout_s)
            self._outbox.close()
            self._outbox = None
        self._metrics.arranged.labels(why).inc()
        self._dispatch(Arranged(number, None, inf))

    def _settle(self) -> None:
        self._asked = 0
        if self._timer:
            self._timer.cancel()
            self._timer = None
