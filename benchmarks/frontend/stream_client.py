"""A client for many streams at once that spends as little as it can: it counts the words of the
events and parses nothing else.

An emulated engine answers with ordinary words, one token each, so that the spaces of an event's
text are its tokens.
"""

import asyncio
import re
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

from foretoken.client.address import HttpAddress

TEXT = re.compile(rb'"content": ?"([^"]*)"')
END = b"0\r\n\r\n"  # the last chunk of a chunked answer
OK = b"HTTP/1.1 200"


@dataclass(slots=True)
class Arrivals:
    """When the tokens of one answer arrived: after `at_s[i]` the client had `tokens[i]`."""

    at_s: "array[float]" = field(default_factory=lambda: array("d"))
    tokens: "array[int]" = field(default_factory=lambda: array("l"))


class StreamingConnection(asyncio.Protocol):
    """Repeats a request on one connection until `stop`. `on_answer` gets each answer's arrivals;
    `tokens` and `events` are those of all answers so far.

    `ended` raises RuntimeError if the server refuses a request or closes the connection early.
    """

    def __init__(self, next_request: Callable[[], bytes], on_answer: Callable[[Arrivals], None]):
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.tokens = self.events = 0
        self._arrivals = Arrivals()
        self._next, self._on_answer = next_request, on_answer
        self._transport: asyncio.Transport
        self._rest = b""
        self._begun = self._stopping = False
        self._count = 0

    @classmethod
    async def open(
        cls,
        url: HttpAddress,
        next_request: Callable[[], bytes],
        on_answer: Callable[[Arrivals], None],
    ) -> "StreamingConnection":
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            lambda: cls(next_request, on_answer), url.host, url.port
        )
        return connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop has its own class
        self._transport.write(self._next())

    def stop(self) -> None:
        """Closes the connection once the current answer has ended."""
        self._stopping = True

    def data_received(self, data: bytes) -> None:
        now_s = time.perf_counter()
        if not self._begun:
            self._begun = True
            if not data.startswith(OK):
                self._fail(data.decode(errors="replace")[:200])
                return
        data = self._rest + data
        complete = data.rfind(b"\n\n") + 2 if b"\n\n" in data else 0
        self._rest = data[complete:]
        words = sum(text.count(b" ") for text in TEXT.findall(data, 0, complete))
        if words:
            self._count += words
            self.tokens += words
            self.events += 1
            self._arrivals.at_s.append(now_s)
            self._arrivals.tokens.append(self._count)
        if self._rest.endswith(END):
            self._end_answer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail("the server closed the connection")

    def _end_answer(self) -> None:
        arrivals, self._arrivals = self._arrivals, Arrivals()
        self._rest, self._begun, self._count = b"", False, 0
        self._on_answer(arrivals)
        if self._stopping:
            if not self.ended.done():
                self.ended.set_result(None)
            self._transport.close()
        else:
            self._transport.write(self._next())

    def _fail(self, reason: str) -> None:
        if not self.ended.done():
            self.ended.set_exception(RuntimeError(f"a stream failed: {reason}"))
        self._transport.close()


def added_latency_s(arrivals: Arrivals, step_s: float) -> list[float]:
    """Seconds that each token of an answer arrived later than its engine made it.

    The engine makes a token every `step_s`. The earliest arrival, relative to its step, counts as
    no delay; a late step of the engine counts as one.
    """
    late_s = [at - n * step_s for at, n in zip(arrivals.at_s, arrivals.tokens, strict=True)]
    least_s = min(late_s, default=0.0)
    added, sent = [], 0
    for late, tokens in zip(late_s, arrivals.tokens, strict=True):
        added += [late - least_s + (tokens - n) * step_s for n in range(sent + 1, tokens + 1)]
        sent = tokens
    return added
