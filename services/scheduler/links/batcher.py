"""Rounds arranged by a batcher that is a process of its own.

One stream, kept open; on it each forecast crosses once in its life. A round whose answer is not
there in time, can't be right, or that nobody can be asked about, is arranged at home: admission
never stops because a peer did. A batcher that fails so is left alone for a doubling while.
"""

import asyncio
import logging
from collections.abc import Callable
from math import inf

from grpc import aio

from protos.generated import batcher_pb2, batcher_pb2_grpc
from services.forecasttable import ForecastTable
from services.policies.preset import Preset
from services.policies.snapshot import Candidates
from services.runtime.backoff import Backoff
from services.runtime.codecs.arrange import Telling, encode_contest, encode_hello
from services.runtime.streams import Outbox
from services.scheduler.codec import decode_arrangement
from services.scheduler.core.events import Arranged
from services.scheduler.links.arrangement_check import flaw
from services.scheduler.observe.metrics import SchedulerMetrics

log = logging.getLogger(__name__)

# Who is back is found in seconds; until then a try costs a connection, or one late round.
PAUSES = Backoff(first_s=0.1, longest_s=5.0)
FORGIVING = 16  # rounds answered on a stream make up for one failure
MOST_QUEUED = 4  # a hello and a round; a stream on which one is late is cut before the next

ArrangeCall = aio.StreamStreamCall[batcher_pb2.ArrangeMessage, batcher_pb2.Arrangement]


class BatcherLink:
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
        self._call: ArrangeCall | None = None
        self._outbox: Outbox[batcher_pb2.ArrangeMessage] | None = None  # while rounds can be asked
        self._telling = Telling(table)
        self._asked: Candidates | None = None  # the round that is out
        self._timer: asyncio.TimerHandle | None = None

    @property
    def connected(self) -> bool:
        """Whether the next round will be asked of the batcher."""
        return self._outbox is not None

    def ask(self, contest: Candidates) -> None:
        """Never waits: the answer, or that there is none, is dispatched later."""
        loop = asyncio.get_running_loop()
        self._asked = contest
        if self._outbox is None:
            loop.call_soon(self._give_up, contest, "gone")
            return
        self._timer = loop.call_later(self._timeout_s, self._late, contest)
        self._outbox.put(encode_contest(contest, self._telling))

    async def run(self) -> None:
        """Until cancelled."""
        failures = 0
        try:
            while True:
                answered = await self._follow()
                failures = max(0, failures + 1 - answered // FORGIVING)
                await asyncio.sleep(PAUSES.after_s(max(0, failures - 1)))
        finally:
            self._settle()

    async def _follow(self) -> int:
        """One stream to its end; how many rounds were answered on it."""
        outbox: Outbox[batcher_pb2.ArrangeMessage] = Outbox(MOST_QUEUED)
        outbox.put(encode_hello(self._preset))
        self._telling = Telling(self._table)
        self._call = call = self._stub.Arrange(aiter(outbox))
        answered = 0
        try:
            await call.wait_for_connection()
            self._outbox = outbox
            async for arrangement in call:
                answered += self._answered(arrangement)
        except aio.AioRpcError as error:
            log.warning("batcher: %s; rounds are arranged here", error.details())
        except asyncio.CancelledError:
            if not _cut(call):
                raise
        finally:
            self._hang_up()
        if self._asked:
            self._give_up(self._asked, "gone")
        return answered

    def _answered(self, arrangement: batcher_pb2.Arrangement) -> bool:
        contest = self._asked
        if contest is None or arrangement.round != contest.round:
            return False  # of no round that is out: the one that is gets late
        arranged = decode_arrangement(arrangement)
        if what := flaw(contest, arranged):
            log.warning("the batcher's answer can't be right: %s", what)
            self._hang_up()
            self._give_up(contest, "wrong")
            return False
        self._settle()
        self._metrics.arranged.labels("batcher").inc()
        self._dispatch(arranged)
        return True

    def _late(self, contest: Candidates) -> None:
        """The stream is cut, so that nothing piles up behind."""
        log.warning("the batcher took over %g s for a round", self._timeout_s)
        self._hang_up()
        self._give_up(contest, "late")

    def _give_up(self, contest: Candidates, why: str) -> None:
        """Arrange it at home."""
        if contest is not self._asked:
            return
        self._settle()
        self._metrics.arranged.labels(why).inc()
        self._dispatch(Arranged(contest.round, None, inf))

    def _hang_up(self) -> None:
        """Rounds are arranged at home from now on; reading from the call ends."""
        if self._outbox:
            self._outbox.close()
        if self._call:
            self._call.cancel()
        self._outbox = self._call = None

    def _settle(self) -> None:
        self._asked = None
        if self._timer:
            self._timer.cancel()
            self._timer = None


def _cut(call: ArrangeCall) -> bool:
    """Whether reading ended because we hung up, and not because our own task is to end."""
    task = asyncio.current_task()
    return call.cancelled() and not (task and task.cancelling())
