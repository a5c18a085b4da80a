"""An open loop over HTTP: requests are sent when they are due, and their streams watched.

The client must not take the cores that it measures: an answer's bytes are looked at for its first
text and for its end, and nothing is parsed between. One connection a request.
"""

import asyncio
import re
import resource
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

from benchmarks.harness.demo_load import Due

STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})")
TEXT = re.compile(rb'"content": ?"[^"]')
USAGE = re.compile(rb'"completion_tokens": ?(\d+)')
ERROR = re.compile(rb'"error": ?\{.*?"message": ?"([^"]*)"', re.DOTALL)
DONE = b"data: [DONE]"
END_BYTES = 2_048  # of an answer, kept for its usage or its error
REFUSED = "429"
LATE, UNREACHABLE, CUT = "not back in time", "unreachable", "ended without its end"


@dataclass(frozen=True)
class Answer:
    """What became of a request, in seconds from the beginning of the load.

    gap_s: the longest between two arrivals of text.
    problem: empty where the whole answer came; else an HTTP status, the message of an error event,
    or one of the reasons above; times and tokens then tell nothing.
    """

    due_s: float
    first_s: float
    last_s: float
    tokens: int
    problem: str = ""
    gap_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.due_s

    @property
    def tpot_s(self) -> float:
        """Between two tokens, on average; 0 for an answer of one."""
        return (self.last_s - self.first_s) / max(self.tokens - 1, 1)

    @property
    def normalised_latency_s(self) -> float:
        """End to end, a token (ALISE's measure)."""
        return (self.last_s - self.due_s) / self.tokens


class Watcher(asyncio.Protocol):
    """Notes when an answer came."""

    def __init__(self) -> None:
        self.over = asyncio.get_running_loop().create_future()
        self.first = self.last = 0.0  # by the monotonic clock; 0: not yet
        self.gap = 0.0
        self.begin = self.end = b""

    def data_received(self, data: bytes) -> None:
        before, self.last = self.last, time.perf_counter()
        if self.first:
            self.gap = max(self.gap, self.last - before)
        else:
            self.begin += data
            if TEXT.search(self.begin):
                self.first = self.last
        self.end = (self.end + data)[-END_BYTES:]
        if DONE in data:
            self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()

    def _end(self) -> None:
        if not self.over.done():
            self.over.set_result(None)

    def answer(self, due_s: float, began: float) -> Answer:
        if problem := self._problem():
            return Answer(due_s, 0.0, 0.0, 0, problem)
        tokens = int(USAGE.findall(self.end)[-1])
        first_s = (self.first or self.last) - began
        return Answer(due_s, first_s, self.last - began, tokens, gap_s=self.gap)

    def _problem(self) -> str:
        status = STATUS.match(self.begin)
        if status and status[1] != b"200":
            return status[1].decode()
        if error := ERROR.search(self.end):
            return error[1].decode(errors="replace")
        if not self.over.done():
            return LATE
        return "" if DONE in self.end and USAGE.search(self.end) else CUT


async def drive(url: str, load: Sequence[Due], bound_s: float) -> list[Answer]:
    """What became of each, in the load's order. Who is not back `bound_s` after the last was sent
    is hung up on."""
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or 80
    began = time.perf_counter()
    asked = []
    for due in load:
        if (wait_s := began + due.at_s - time.perf_counter()) > 0:
            await asyncio.sleep(wait_s)
        asked.append(asyncio.create_task(_ask(host, port, due, began)))
    _, late = await asyncio.wait(asked, timeout=bound_s)
    for task in late:
        task.cancel()
    return list(await asyncio.gather(*asked))


async def _ask(host: str, port: int, due: Due, began: float) -> Answer:
    try:
        transport, watcher = await asyncio.get_running_loop().create_connection(Watcher, host, port)
    except OSError:
        return Answer(due.at_s, 0.0, 0.0, 0, UNREACHABLE)
    except asyncio.CancelledError:
        return Answer(due.at_s, 0.0, 0.0, 0, LATE)
    transport.write(_request(host, port, due.body))
    with suppress(asyncio.CancelledError):
        await asyncio.shield(watcher.over)
    answer = watcher.answer(due.at_s, began)
    transport.abort()
    return answer


def _request(host: str, port: int, body: bytes) -> bytes:
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}:{port}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode() + body


def allow_open_files() -> None:
    """A connection a request that waits is, under overload, more than the usual 1,024 files; so it
    is for servers started after this."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
