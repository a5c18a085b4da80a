"""The link to a batcher process, which arranges rounds.

The link keeps one stream open, on which each forecast is sent once. If a round cannot be sent, or
its answer is late or invalid, the scheduler arranges it: admission never waits for a peer. After a
failure the link reconnects with exponential backoff.
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
from services.runtime.codecs.arrange import SentForecasts, encode_candidates, encode_hello
from services.runtime.network.backoff import Backoff
from services.runtime.network.streams import Outbox
from services.scheduler.codec import decode_arrangement
from services.scheduler.core.events import Arranged
from services.scheduler.links.arrangement_check import find_flaw
from services.scheduler.observe.metrics import SchedulerMetrics

log = logging.getLogger(__name__)

# A batcher that is back is found within seconds; a failed try costs a connection or one late round.
RECONNECTS = Backoff(first_s=0.1, longest_s=5.0)
ANSWERS_PER_FAILURE = 16  # rounds answered on a stream offset one failure
MAX_QUEUED = 4  # a hello and a round; a stream with a late round is closed before the next

ArrangeCall = aio.StreamStreamCall[batcher_pb2.ArrangeMessage, batcher_pb2.Arrangement]


class BatcherLink:
    """`ask` sends a round and never waits; its answer, or the lack of one, is dispatched. `run`
    keeps the stream open."""

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
        self._outbox: Outbox[batcher_pb2.ArrangeMessage] | None = None  # while connected
        self._sent_forecasts = SentForecasts(table)
        self._pending: Candidates | None = None  # the round that waits for its answer
        self._timer: asyncio.TimerHandle | None = None

    @property
    def connected(self) -> bool:
        """Whether the next round is sent to the batcher."""
        return self._outbox is not None

    def ask(self, candidates: Candidates) -> None:
        loop = asyncio.get_running_loop()
        self._pending = candidates
        if self._outbox is None:
            loop.call_soon(self._fall_back, candidates, "gone")
            return
        self._timer = loop.call_later(self._timeout_s, self._late, candidates)
        self._outbox.put(encode_candidates(candidates, self._sent_forecasts))

    async def run(self) -> None:
        """Reconnects until cancelled."""
        failures = 0
        try:
            while True:
                answered = await self._follow()
                failures = max(0, failures + 1 - answered // ANSWERS_PER_FAILURE)
                await asyncio.sleep(RECONNECTS.after_s(max(0, failures - 1)))
        finally:
            self._settle()

    async def _follow(self) -> int:
        """Reads one stream to its end; returns the number of rounds answered on it."""
        outbox: Outbox[batcher_pb2.ArrangeMessage] = Outbox(MAX_QUEUED)
        outbox.put(encode_hello(self._preset))
        self._sent_forecasts = SentForecasts(self._table)
        self._call = call = self._stub.Arrange(aiter(outbox))
        answered = 0
        try:
            await call.wait_for_connection()
            self._outbox = outbox
            async for arrangement in call:
                answered += self._answered(arrangement)
        except aio.AioRpcError as error:
            log.warning("batcher: %s; the scheduler arranges rounds", error.details())
        except asyncio.CancelledError:
            if not _closed_by_us(call):
                raise
        finally:
            self._close()
            outbox.close()  # gRPC's writer waits for messages otherwise
        if self._pending:
            self._fall_back(self._pending, "gone")
        return answered

    def _answered(self, arrangement: batcher_pb2.Arrangement) -> bool:
        candidates = self._pending
        if candidates is None or arrangement.round != candidates.round:
            return False  # not the pending round, which will be late
        arranged = decode_arrangement(arrangement)
        if flaw := find_flaw(candidates, arranged):
            log.warning("the batcher's answer is invalid: %s; the scheduler arranges rounds", flaw)
            self._close()
            self._fall_back(candidates, "wrong")
            return False
        self._settle()
        self._metrics.arranged.labels("batcher").inc()
        self._dispatch(arranged)
        return True

    def _late(self, candidates: Candidates) -> None:
        """Closes the stream, so that rounds do not queue behind the late one."""
        log.warning(
            "the batcher took longer than %g s (batcher_timeout_s); the scheduler arranges rounds",
            self._timeout_s,
        )
        self._close()
        self._fall_back(candidates, "late")

    def _fall_back(self, candidates: Candidates, why: str) -> None:
        """Lets the scheduler arrange this round."""
        if candidates is not self._pending:
            return
        self._settle()
        self._metrics.arranged.labels(why).inc()
        self._dispatch(Arranged(candidates.round, None, inf))

    def _close(self) -> None:
        """Ends the stream; `_follow` returns."""
        if self._outbox:
            self._outbox.close()
        if self._call:
            self._call.cancel()
        self._outbox = self._call = None

    def _settle(self) -> None:
        self._pending = None
        if self._timer:
            self._timer.cancel()
            self._timer = None


def _closed_by_us(call: ArrangeCall) -> bool:
    """Whether reading ended because `_close` cancelled the call, not because our task is
    cancelled."""
    task = asyncio.current_task()
    return call.cancelled() and not (task and task.cancelling())
