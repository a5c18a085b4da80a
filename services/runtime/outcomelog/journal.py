"""Journal: writes rows to the outcome log and delivers rows from it without blocking serving."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress

from services.runtime.network.backoff import Backoff
from services.runtime.outcomelog.interface import LogUnavailable, OutcomeLog, Row

log = logging.getLogger(__name__)

QUEUE_MAX = 10_000  # rows to write: an outage of ten seconds at 1,000 outcomes/s
POLL_S = 1.0  # learners need tens of outcomes, so one poll per second is frequent enough
FLUSH_S = 5.0  # for the rest at a stop: a full queue takes about 2 s
BATCH_ROWS = 256  # written in one transaction; a queue of this length is written immediately
PAGE_ROWS = 256  # read and delivered in one turn of the event loop
PAYLOAD_BYTES_MAX = 64 * 2**10  # an embedding is under 4 KiB; bounds a batch or a page to 16 MiB
VERSION_MAX = 2**31 - 1
KIND_CHARS_MAX = 64
RETRIES = Backoff(0.1, 5.0)


class Journal:
    """Writes rows and follows the log, also across outages of the log.

    `deliver` receives all rows of the log, from this process and from others, once and in log
    order, beginning with the stored rows: those of the kinds in `version_max`, up to the given
    versions. It is called on the event loop of `run`, as are all methods. Owns `outcomes` and
    closes it.
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
        # Counts of rows.
        self.written = 0
        self.dropped = 0  # not written: the queue was full, the row invalid, or the log unavailable
        self.delivered = 0
        self.undeliverable = 0  # `deliver` raised
        self.from_future = 0  # skipped, because a newer foretoken wrote them
        self.unavailable = False  # whether the last access to the log failed
        self._log = outcomes
        self._deliver = deliver
        self._version_max = version_max
        self._poll_s, self._flush_s = poll_s, flush_s
        self._queue: deque[Row] = deque(maxlen=queue_max)
        self._batch: list[Row] = []  # rows from the queue that are not known to be written
        self._tried = False  # whether an append of the batch was tried, and may have succeeded
        self._wake = asyncio.Event()
        self._position = ""
        self._dropped_before = 0  # `dropped` when the log became unavailable
        self._invalid_logged = False

    @property
    def pending(self) -> int:
        """Rows not yet written."""
        return len(self._queue) + len(self._batch)

    @property
    def replaced(self) -> bool:
        """Whether the log was unusable and began anew."""
        return self._log.replaced

    def put(self, row: Row) -> None:
        """Queues a row; a full queue drops its oldest row. Never waits or raises."""
        if not _is_valid(row):
            return self._drop_invalid(row)
        self.dropped += len(self._queue) == self._queue.maxlen
        self._queue.append(row)
        if len(self._queue) >= BATCH_ROWS:
            self._wake.set()
        return None

    async def run(self) -> None:
        """Writes and reads until cancelled; then writes the queued rows and closes the log."""
        failures = 0
        try:
            while True:
                try:
                    more = await self._step()
                except LogUnavailable as error:
                    self._on_unavailable(error)
                    await asyncio.sleep(RETRIES.after_s(failures))
                    failures += 1
                else:
                    self._on_available()
                    failures = 0
                    await (asyncio.sleep(0) if more else self._idle())
        finally:
            await self._finish()

    async def _step(self) -> bool:
        """Reads a page and writes a batch; returns whether there may be more. Reads first, because
        a full disk stops only writing."""
        read = await self._read()
        return await self._write() or read

    async def _read(self) -> bool:
        entries = await self._log.read(self._position, PAGE_ROWS)
        if entries:
            self._position = entries[-1].position
            self._deliver_rows([entry.row for entry in entries if self._is_readable(entry.row)])
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
                str(error) or f"not done after {self._flush_s:g} s",
            )
            self.dropped += self.pending
        finally:
            await self._log.close()

    def _deliver_rows(self, rows: list[Row]) -> None:
        if not rows:
            return
        try:
            self._deliver(rows)
        except Exception:  # one bad row must not end the service at every start
            if not self.undeliverable:
                log.exception("outcomes from the log cannot be used (logged once)")
            self.undeliverable += len(rows)
        else:
            self.delivered += len(rows)

    def _is_readable(self, row: Row) -> bool:
        known = self._version_max.get(row.kind)
        if known is None or row.version <= known:
            return known is not None
        if not self.from_future:
            log.warning(
                "skipping outcomes written by a newer foretoken (%s version %d; this one reads up "
                "to version %d); upgrade this service to use them",
                row.kind,
                row.version,
                known,
            )
        self.from_future += 1
        return False

    def _drop_invalid(self, row: Row) -> None:
        self.dropped += 1
        if not self._invalid_logged:
            self._invalid_logged = True
            log.warning(
                "dropped an invalid outcome (kind %.80r, version %d, %d bytes; logged once)",
                row.kind,
                row.version,
                len(row.payload),
            )

    def _on_unavailable(self, error: LogUnavailable) -> None:
        if not self.unavailable:
            self.unavailable = True
            self._dropped_before = self.dropped
            log.warning("outcomes are queued in memory, and serving continues: %s", error)

    def _on_available(self) -> None:
        if self.unavailable:
            self.unavailable = False
            dropped = self.dropped - self._dropped_before
            log.info("the outcome log is available again; %d outcomes were dropped", dropped)


def _is_valid(row: Row) -> bool:
    return (
        0 < len(row.kind) <= KIND_CHARS_MAX
        and row.kind.isascii()
        and 0 <= row.version <= VERSION_MAX
        and len(row.payload) <= PAYLOAD_BYTES_MAX
    )
