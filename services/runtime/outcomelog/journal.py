"""A service's access to the outcome log: rows are written and delivered without ever blocking
serving."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress

from services.runtime.backoff import Backoff
from services.runtime.outcomelog.interface import Entry, LogUnavailable, OutcomeLog, Row

log = logging.getLogger(__name__)

# Rows waiting to be written: ten seconds at 1,000 outcomes/s, or a long outage at lower rates.
QUEUE_MAX = 10_000
# Learners need tens of outcomes; one poll per second is frequent enough and costs nothing.
POLL_S = 1.0
FLUSH_S = 5.0  # a full queue takes about 2 s to write; an unavailable log must not delay a stop
# a transaction's cost is spread over these; as many waiting rows are written at once
BATCH_ROWS = 256
PAGE_ROWS = 256  # read and delivered at once, between turns of the event loop
PAYLOAD_BYTES_MAX = 64 * 2**10  # an embedding is under 4 KiB; bounds a batch or a page to 16 MiB
VERSION_MAX = 2**31 - 1
KIND_CHARS_MAX = 64
RETRIES = Backoff(0.1, 5.0)


class Journal:
    """Writes rows, follows the log, and survives its unavailability.

    `deliver` receives every row of the log, of this process and of others, once and in log order,
    beginning with the stored ones: only kinds named in `version_max`, and only versions up to the
    given one. It is called on the event loop. `run` must run for any of this; all other methods are
    called from its event loop. Owns `log` and closes it.
    """

    def __init__(
        self,
        outcomes: OutcomeLog,
        deliver: Callable[[list[Row]], None],
        version_max: Mapping[str, int],
        *,
        queue_max: int = QUEUE_MAX,
        poll_s: float = POLL_S,
        flush_s: float = FLUSH_S,
    ):
        self.replayed = asyncio.Event()  # set when all stored rows have been delivered
        self.written = 0  # rows, like all counts below
        self.dropped = 0  # never written: the queue was full, the row unfit, or the log unavailable
        self.delivered = 0
        self.undeliverable = 0  # `deliver` raised
        self.from_future = 0  # written by a newer foretoken
        self.unavailable = False  # the log, at the last attempt
        self._log = outcomes
        self._deliver = deliver
        self._version_max = version_max
        self._poll_s, self._flush_s = poll_s, flush_s
        self._queue: deque[Row] = deque(maxlen=queue_max)
        self._batch: list[Row] = []  # taken from the queue, and not known to be written
        self._tried = False  # whether that batch was attempted, so that the log may have it
        self._wake = asyncio.Event()
        self._position = ""
        self._dropped_before = 0  # when the log became unavailable
        self._unfit_said = False

    @property
    def pending(self) -> int:
        """Rows not yet written."""
        return len(self._queue) + len(self._batch)

    def put(self, row: Row) -> None:
        """Queues a row. Never waits or raises: a full queue drops its oldest row."""
        if not _fits(row):
            return self._drop_unfit(row)
        self.dropped += len(self._queue) == self._queue.maxlen
        self._queue.append(row)
        if len(self._queue) >= BATCH_ROWS:
            self._wake.set()
        return None

    async def run(self) -> None:
        """Writes and follows until cancelled; then writes the rest and closes the log."""
        failures = 0
        try:
            while True:
                try:
                    more = await self._step()
                except LogUnavailable as error:
                    self._gone(error)
                    await asyncio.sleep(RETRIES.after_s(failures))
                    failures += 1
                else:
                    self._here()
                    failures = 0
                    await (asyncio.sleep(0) if more else self._idle())
        finally:
            await self._finish()

    async def _step(self) -> bool:
        """Reads a page and writes a batch; returns whether there may be more. Reading comes first:
        a full disk only stops writing."""
        read = await self._read()
        return await self._write() or read

    async def _read(self) -> bool:
        entries = await self._log.read(self._position, PAGE_ROWS)
        if entries:
            self._position = entries[-1].position
            self._hand_on(entries)
        if len(entries) < PAGE_ROWS:
            self.replayed.set()
        return len(entries) == PAGE_ROWS

    async def _write(self) -> bool:
        if not self._batch:
            self._tried = False
            while self._queue and len(self._batch) < BATCH_ROWS:
                self._batch.append(self._queue.popleft())
        if not self._batch:
            return False
        again, self._tried = self._tried, True
        await self._log.append(self._batch, again)
        self.written += len(self._batch)
        self._batch = []
        return True

    async def _idle(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._poll_s):
                await self._wake.wait()
        self._wake.clear()

    async def _finish(self) -> None:
        try:
            async with asyncio.timeout(self._flush_s):
                while await self._write():
                    pass
        except (LogUnavailable, TimeoutError) as error:
            log.warning(
                "stopping with %d outcomes not written: %s",
                self.pending,
                str(error) or "out of time",
            )
            self.dropped += self.pending
        finally:
            await self._log.close()

    def _hand_on(self, entries: list[Entry]) -> None:
        rows = [entry.row for entry in entries if self._is_readable(entry.row)]
        if not rows:
            return
        try:
            self._deliver(rows)
        except Exception:  # one bad row must not end the service at every start
            if not self.undeliverable:
                log.exception("outcomes from the log could not be used; this is said once")
            self.undeliverable += len(rows)
        else:
            self.delivered += len(rows)

    def _is_readable(self, row: Row) -> bool:
        known = self._version_max.get(row.kind)
        if known is not None and row.version > known:
            self._pass_over(row, known)
        return known is not None and row.version <= known

    def _pass_over(self, row: Row, known: int) -> None:
        if not self.from_future:
            log.warning(
                "the log holds outcomes written by a newer foretoken (%s version %d, known is %d):"
                " they are passed over",
                row.kind,
                row.version,
                known,
            )
        self.from_future += 1

    def _drop_unfit(self, row: Row) -> None:
        self.dropped += 1
        if not self._unfit_said:
            self._unfit_said = True
            log.warning(
                "dropped an outcome no log takes (kind %.80r, version %d, %d bytes); said once",
                row.kind,
                row.version,
                len(row.payload),
            )

    def _gone(self, error: LogUnavailable) -> None:
        if not self.unavailable:
            self.unavailable = True
            self._dropped_before = self.dropped
            log.warning("outcomes wait in memory and serving goes on: %s", error)

    def _here(self) -> None:
        if self.unavailable:
            self.unavailable = False
            lost = self.dropped - self._dropped_before
            log.info("the outcome log is back; %d outcomes were dropped meanwhile", lost)


def _fits(row: Row) -> bool:
    return (
        0 < len(row.kind) <= KIND_CHARS_MAX
        and row.kind.isascii()
        and 0 <= row.version <= VERSION_MAX
        and len(row.payload) <= PAYLOAD_BYTES_MAX
    )
