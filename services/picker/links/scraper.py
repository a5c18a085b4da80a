"""Scrapes the metrics of model servers, over one kept connection each."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable

from services.picker.core.endpoints import QUERY, Reading, parse_metrics
from services.picker.metrics import FAILED, LATE, READ
from services.runtime.network.backoff import Backoff
from services.runtime.network.delivery import describe
from services.runtime.network.wire import AnswerReader, WireError

log = logging.getLogger(__name__)

MAX_METRICS_BYTES = 8 * 2**20
READ_BYTES = 2**18
RETRIES = Backoff(0.1, 2.0)


class ScrapeError(Exception):
    """An endpoint that cannot be read, in one sentence."""


class Connection:
    """A connection to one server, opened when it is needed."""

    def __init__(self, address: str, path: str):
        host, _, port = address.rpartition(":")
        self._host, self._port = host.strip("[]"), int(port)
        target = path if "?" in path else f"{path}?{QUERY}"
        self._request = (
            f"GET {target} HTTP/1.1\r\nHost: {address}\r\nAccept: text/plain\r\n\r\n".encode()
        )
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def get(self) -> bytes:
        """The body of the path. Raises ScrapeError. A kept connection that the server has closed
        is opened anew once."""
        kept = self._streams is not None
        try:
            return await self._exchange()
        except (OSError, EOFError):
            self.close()
            if not kept:
                raise
            return await self._exchange()

    async def _exchange(self) -> bytes:
        if self._streams is None:
            self._streams = await asyncio.open_connection(self._host, self._port)
        reader, writer = self._streams
        parts: list[bytes] = []
        answer = AnswerReader(parts.append)
        writer.write(self._request)
        size = 0
        while not answer.done:
            data = await reader.read(READ_BYTES)
            if not data:
                answer.end()
                if not answer.done:
                    raise EOFError("it closes connections without an answer")
            size += len(data)
            if size > MAX_METRICS_BYTES:
                raise ScrapeError(f"its metrics have over {MAX_METRICS_BYTES >> 20} MiB")
            answer.feed(data)
        if not answer.reusable:
            self.close()
        if answer.status != 200:
            raise ScrapeError(f"its metrics have status {answer.status}")
        return b"".join(parts)

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


class Scraper:
    """One task per endpoint. `on_reading(address, reading, asked_s)` and `on_failure(address, why)`
    are called on the event loop; `count` with the result of each scrape."""

    def __init__(
        self,
        path: str,
        interval_s: float,
        limit_s: float,
        on_reading: Callable[[str, Reading, float], None],
        on_failure: Callable[[str, str], None],
        count: Callable[[str], None],
    ):
        self._path, self._interval_s, self._limit_s = path, interval_s, limit_s
        self._on_reading, self._on_failure, self._count = on_reading, on_failure, count
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._wanted: frozenset[str] = frozenset()
        self._changed = asyncio.Event()

    def follow(self, addresses: Iterable[str]) -> None:
        """Replaces the endpoints to scrape."""
        self._wanted = frozenset(addresses)
        self._changed.set()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            while True:
                for address in self._tasks.keys() - self._wanted:
                    self._tasks.pop(address).cancel()
                for address in sorted(self._wanted - self._tasks.keys()):
                    self._tasks[address] = group.create_task(self._scrape(address))
                self._changed.clear()
                await self._changed.wait()

    async def _scrape(self, address: str) -> None:
        """Scrapes until cancelled. A loss and a return are logged once each."""
        connection = Connection(address, self._path)
        clock = time.monotonic
        failures = 0
        try:
            while True:
                asked_s = clock()
                problem = await self._read_once(connection, address, asked_s)
                if problem and not failures:
                    log.warning("endpoint %s is left out: %s", address, problem)
                elif failures and not problem:
                    log.warning("endpoint %s answers", address)
                failures = failures + 1 if problem else 0
                pause_s = RETRIES.after_s(failures - 1) if failures else self._interval_s
                await asyncio.sleep(max(0.0, asked_s + pause_s - clock()))
        finally:
            connection.close()

    async def _read_once(self, connection: Connection, address: str, asked_s: float) -> str:
        """Returns why there is no reading; empty if there is one."""
        try:
            async with asyncio.timeout(self._limit_s):
                reading = parse_metrics(await connection.get())
        except TimeoutError:
            connection.close()
            self._count(LATE)
            self._on_failure(address, problem := f"no metrics within {self._limit_s:g} s")
            return problem
        except (OSError, EOFError, ScrapeError, WireError, ValueError) as error:
            connection.close()
            self._count(FAILED)
            self._on_failure(address, problem := describe(error))
            return problem
        self._count(READ)
        self._on_reading(address, reading, asked_s)
        return ""
