"""An OpenAI-compatible server over HTTP: requests sent, their streams read as they come.

Connections are kept and used again, as clients of users do; thousands may be open at once.
"""

import asyncio
import json
import ssl
import time
from contextlib import suppress
from typing import Any, cast

from foretoken.bench.samples import CUT, LATE, STOPPED, UNREACHABLE, Sample
from foretoken.bench.wire import AnswerReader, EventReader, WireError
from foretoken.client.address import SLA_HEADER, HttpAddress

CONNECT_S = 10.0
MOST_SAID = 300  # characters of a server's message that are kept
KEPT_BODY_BYTES = 2**20  # of an answer that is no stream
DONE = b"[DONE]"
TEXT_KEYS = ("content", "reasoning_content", "reasoning", "tool_calls")


class Unreachable(ValueError):
    """Nobody answers there, or not in HTTP; a sentence."""


class Server:
    """One server and the connections to it. Close it, within a running event loop."""

    def __init__(self, url: str, api_key: str = ""):
        self.address = HttpAddress.of(url)
        self._head = f"Host: {self.address.authority}\r\n"
        if api_key:
            self._head += f"Authorization: Bearer {api_key}\r\n"
        self._context = ssl.create_default_context() if self.address.secure else None
        self._idle: list[_Connection] = []

    async def fetch(self, method: str, path: str, timeout_s: float) -> tuple[int, bytes]:
        """Status and body of a small answer. Raises Unreachable."""
        body = bytearray()

        def keep(piece: bytes) -> None:
            if len(body) < KEPT_BODY_BYTES:
                body.extend(piece)

        reader = AnswerReader(keep)
        try:
            async with asyncio.timeout(timeout_s):
                await self._exchange(self._request(method, path, b"", ""), reader)
        except TimeoutError:
            raise Unreachable(f"{self.address} does not answer within {timeout_s:g} s") from None
        except OSError as error:
            why = error.strerror or str(error) or type(error).__name__
            raise Unreachable(f"no server answers at {self.address}: {why}") from None
        except WireError as error:
            raise Unreachable(f"{self.address}: {error}") from None
        if not reader.done:
            raise Unreachable(f"{self.address} hung up before it had answered")
        return reader.status, bytes(body)

    async def ask(
        self, path: str, body: bytes, sample: Sample, began: float, timeout_s: float | None = None
    ) -> None:
        """Send a request that asks for a stream and note in `sample` what comes, in seconds from
        `began` of `time.perf_counter`. Whatever goes wrong is its `problem`."""
        taking = _Stream(sample, began)
        request = self._request("POST", path, body, sample.sla_class)
        sample.sent_s = time.perf_counter() - began
        try:
            async with asyncio.timeout(timeout_s):
                await self._exchange(request, taking.reader)
        except TimeoutError:
            sample.problem = LATE
        except ConnectionResetError:
            sample.problem = CUT
        except OSError:
            sample.problem = UNREACHABLE
        except WireError as error:
            sample.problem = str(error)
        except asyncio.CancelledError:
            sample.problem = STOPPED
            raise
        finally:
            taking.finish()

    async def close(self) -> None:
        for connection in self._idle:
            connection.transport.close()
        self._idle.clear()

    def _request(self, method: str, path: str, body: bytes, sla_class: str) -> bytes:
        sla = f"{SLA_HEADER}: {sla_class}\r\n" if sla_class else ""
        head = f"{method} {self.address.base}{path} HTTP/1.1\r\n{self._head}{sla}"
        if body:
            head += "Content-Type: application/json\r\n"
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body

    async def _exchange(self, request: bytes, reader: AnswerReader) -> None:
        """One request and its answer. A kept connection that its server has closed meanwhile is
        no fault of the server's: the request goes over another. Raises OSError, WireError."""
        while True:
            kept = bool(self._idle)
            connection = self._idle.pop() if kept else await self._connect()
            try:
                await connection.exchange(request, reader)
            except OSError:
                if kept and not reader.status:
                    continue
                raise
            finally:
                if reader.reusable and not connection.transport.is_closing():
                    self._idle.append(connection)
                else:
                    connection.transport.abort()
            return

    async def _connect(self) -> "_Connection":
        loop = asyncio.get_running_loop()
        host, port = self.address.host, self.address.port
        try:
            async with asyncio.timeout(CONNECT_S):
                _, made = await loop.create_connection(_Connection, host, port, ssl=self._context)
        except TimeoutError:
            raise ConnectionError(f"no connection within {CONNECT_S:g} s") from None
        return made


class _Connection(asyncio.Protocol):
    """Carries one exchange at a time."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport
        self._reader: AnswerReader | None = None
        self._over: asyncio.Future[None] | None = None
        self._lost = False

    async def exchange(self, request: bytes, reader: AnswerReader) -> None:
        """Until the answer is whole, or the connection is lost within it: ConnectionResetError
        where nothing had come."""
        if self._lost:
            raise ConnectionResetError("closed meanwhile")
        self._reader, self._over = reader, asyncio.get_running_loop().create_future()
        try:
            self.transport.write(request)
            await self._over
        finally:
            self._reader = self._over = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is none of asyncio's classes

    def data_received(self, data: bytes) -> None:
        reader, over = self._reader, self._over
        if reader is None or over is None or over.done():
            return
        try:
            reader.feed(data)
        except WireError as error:
            over.set_exception(error)
            return
        if reader.done:
            over.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        reader, over = self._reader, self._over
        if reader is None or over is None or over.done():
            return
        reader.end()
        if reader.status:
            over.set_result(None)
        else:
            over.set_exception(ConnectionResetError("hung up"))


class _Stream:
    """Notes a stream's events in a sample."""

    def __init__(self, sample: Sample, began: float):
        self.reader = AnswerReader(self._take)
        self._sample, self._began = sample, began
        self._events = EventReader()
        self._refusal = bytearray()
        self._ended = False

    def finish(self) -> None:
        """The exchange is over, one way or another."""
        sample = self._sample
        sample.status = self.reader.status
        if not sample.end_s:
            sample.end_s = time.perf_counter() - self._began
        if sample.problem:
            return
        if sample.status != 200:
            sample.problem = f"HTTP {sample.status}: {said_by(bytes(self._refusal))}"
        elif not self._ended and not sample.finish_reason:
            sample.problem = CUT
        if not sample.told:
            sample.output_tokens = len(sample.text_s)

    def _take(self, piece: bytes) -> None:
        if self.reader.status != 200:
            if len(self._refusal) < KEPT_BODY_BYTES:
                self._refusal.extend(piece)
            return
        now_s = time.perf_counter() - self._began
        for event in self._events.feed(piece):
            if event == DONE:
                self._ended, self._sample.end_s = True, now_s
                continue
            try:
                self._note(event, now_s)
            except (ValueError, TypeError, AttributeError):
                raise WireError("an event of the stream is not as OpenAI's are") from None

    def _note(self, event: bytes, now_s: float) -> None:
        sample, told = self._sample, json.loads(event)
        if told.get("error"):
            sample.problem = said_by(event)
        for choice in told.get("choices") or ():
            if reason := choice.get("finish_reason"):
                sample.finish_reason, sample.end_s = str(reason), now_s
            if _has_text(choice):
                sample.text_s.append(now_s)
        if usage := told.get("usage"):
            sample.prompt_tokens = int(usage.get("prompt_tokens") or 0)
            sample.output_tokens = int(usage.get("completion_tokens") or 0)
            sample.told = True


def _has_text(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta")
    return bool(choice.get("text") or (delta and any(delta.get(key) for key in TEXT_KEYS)))


def said_by(body: bytes) -> str:
    """What an error answer says, in whichever of the usual shapes; one line."""
    text = body.decode(errors="replace")
    with suppress(ValueError):
        told = json.loads(text)
        inner = told.get("error", told) if isinstance(told, dict) else told
        if isinstance(inner, dict):
            inner = inner.get("message") or inner.get("detail") or inner
        text = inner if isinstance(inner, str) else json.dumps(inner)
    return " ".join(text.split())[:MOST_SAID] or "no reason given"
