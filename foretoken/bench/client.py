"""A streaming HTTP client for OpenAI-compatible servers.

Connections are kept alive and reused, as users' clients do; thousands may be open at a time.
"""

import asyncio
import json
import ssl
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, cast

from foretoken.bench.prompts import Writer
from foretoken.bench.samples import STOPPED, TIMED_OUT, TRUNCATED, UNREACHABLE, Sample
from foretoken.client.address import SLA_HEADER, HttpAddress
from services.runtime.network.wire import AnswerReader, EventReader, WireError

CONNECT_S = 10.0
MAX_ERROR_CHARS = 300
MAX_BODY_BYTES = 2**20  # of a response that is not a stream
DONE = b"[DONE]"
TEXT_KEYS = ("content", "reasoning_content", "reasoning", "tool_calls")


class Unreachable(ValueError):
    """The server cannot be reached or does not speak HTTP."""


class Server:
    """One server and its connections. Use and close it within a running event loop."""

    writer = Writer

    def __init__(self, url: str, api_key: str = ""):
        self.address = HttpAddress.parse(url)
        self._head = f"Host: {self.address.authority}\r\n"
        if api_key:
            self._head += f"Authorization: Bearer {api_key}\r\n"
        self._context = ssl.create_default_context() if self.address.secure else None
        self._idle: list[_Connection] = []

    async def fetch(self, method: str, path: str, timeout_s: float) -> tuple[int, bytes]:
        """Returns status and body of a small response. Raises Unreachable."""
        body = bytearray()

        def keep(piece: bytes) -> None:
            if len(body) < MAX_BODY_BYTES:
                body.extend(piece)

        reader = AnswerReader(keep)
        try:
            async with asyncio.timeout(timeout_s):
                await self._exchange(self._request(method, path, b"", ""), reader)
        except TimeoutError:
            raise Unreachable(f"{self.address} does not answer within {timeout_s:g} s") from None
        except OSError as error:
            cause = error.strerror or str(error) or type(error).__name__
            raise Unreachable(f"no server answers at {self.address}: {cause}") from None
        except WireError as error:
            raise Unreachable(f"{self.address}: {error}") from None
        if not reader.done:
            raise Unreachable(f"{self.address} closed the connection before it answered")
        return reader.status, bytes(body)

    async def stream(
        self,
        path: str,
        body: bytes,
        sample: Sample,
        started: float,
        timeout_s: float | None = None,
        headers: Sequence[str] = (),
    ) -> None:
        """Sends a streaming request and records its answer in `sample`. `headers` are lines beside
        those of every request.

        Times count from `started` of `time.perf_counter`. A failure becomes the sample's `problem`.
        """
        recorder = _StreamRecorder(sample, started)
        request = self._request("POST", path, body, sample.sla_class, headers)
        sample.sent_s = time.perf_counter() - started
        try:
            async with asyncio.timeout(timeout_s):
                await self._exchange(request, recorder.reader)
        except TimeoutError:
            sample.problem = TIMED_OUT
        except ConnectionResetError:
            sample.problem = TRUNCATED
        except OSError:
            sample.problem = UNREACHABLE
        except WireError as error:
            sample.problem = str(error)
        except asyncio.CancelledError:
            sample.problem = STOPPED
            raise
        finally:
            recorder.finish()

    async def close(self) -> None:
        for connection in self._idle:
            connection.transport.close()
        self._idle.clear()

    def _request(
        self, method: str, path: str, body: bytes, sla_class: str, headers: Sequence[str] = ()
    ) -> bytes:
        sla = f"{SLA_HEADER}: {sla_class}\r\n" if sla_class else ""
        more = "".join(f"{line}\r\n" for line in headers)
        head = f"{method} {self.address.base}{path} HTTP/1.1\r\n{self._head}{sla}{more}"
        if body:
            head += "Content-Type: application/json\r\n"
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body

    async def _exchange(self, request: bytes, reader: AnswerReader) -> None:
        """Sends one request and reads its response.

        A reused connection that the server has closed is replaced without an error. Raises OSError
        and WireError.
        """
        while True:
            reused = bool(self._idle)
            connection = self._idle.pop() if reused else await self._connect()
            try:
                await connection.exchange(request, reader)
            except OSError:
                if reused and not reader.status:
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
                _, connection = await loop.create_connection(
                    _Connection, host, port, ssl=self._context
                )
        except TimeoutError:
            raise ConnectionError(f"no connection within {CONNECT_S:g} s") from None
        return connection


class _Connection(asyncio.Protocol):
    """A connection that carries one exchange at a time."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport
        self._reader: AnswerReader | None = None
        self._over: asyncio.Future[None] | None = None
        self._lost = False

    async def exchange(self, request: bytes, reader: AnswerReader) -> None:
        """Waits until the response is complete or the connection closes.

        Raises ConnectionResetError if it closes before the response begins.
        """
        if self._lost:
            raise ConnectionResetError("the connection is closed")
        self._reader, self._over = reader, asyncio.get_running_loop().create_future()
        try:
            self.transport.write(request)
            await self._over
        finally:
            self._reader = self._over = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop has its own class

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
            over.set_exception(ConnectionResetError("the server closed the connection"))


class _StreamRecorder:
    """Records the events of a stream in a sample."""

    def __init__(self, sample: Sample, started: float):
        self.reader = AnswerReader(self._on_body)
        self._sample, self._started = sample, started
        self._events = EventReader()
        self._error_body = bytearray()
        self._ended = False

    def finish(self) -> None:
        """Completes the sample once the exchange has ended."""
        sample = self._sample
        sample.status = self.reader.status
        if not sample.end_s:
            sample.end_s = time.perf_counter() - self._started
        if sample.problem:
            return
        if sample.status != 200:
            sample.problem = f"HTTP {sample.status}: {error_text(bytes(self._error_body))}"
        elif not self._ended and not sample.finish_reason:
            sample.problem = TRUNCATED
        if not sample.has_usage:
            sample.output_tokens = len(sample.text_s)

    def _on_body(self, piece: bytes) -> None:
        if self.reader.status != 200:
            if len(self._error_body) < MAX_BODY_BYTES:
                self._error_body.extend(piece)
            return
        now_s = time.perf_counter() - self._started
        for event in self._events.feed(piece):
            if event == DONE:
                self._ended, self._sample.end_s = True, now_s
                continue
            try:
                self._record(event, now_s)
            except (ValueError, TypeError, AttributeError):
                raise WireError("an event of the stream is not in OpenAI's format") from None

    def _record(self, event: bytes, now_s: float) -> None:
        sample, content = self._sample, json.loads(event)
        if content.get("error"):
            sample.problem = error_text(event)
        for choice in content.get("choices") or ():
            if reason := choice.get("finish_reason"):
                sample.finish_reason, sample.end_s = str(reason), now_s
            if _has_text(choice):
                sample.text_s.append(now_s)
        if usage := content.get("usage"):
            sample.prompt_tokens = int(usage.get("prompt_tokens") or 0)
            sample.output_tokens = int(usage.get("completion_tokens") or 0)
            sample.has_usage = True


def _has_text(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta")
    return bool(choice.get("text") or (delta and any(delta.get(key) for key in TEXT_KEYS)))


def error_text(body: bytes) -> str:
    """Returns the message of an error response, in any of the usual formats, as one line."""
    text = body.decode(errors="replace")
    with suppress(ValueError):
        content = json.loads(text)
        inner = content.get("error", content) if isinstance(content, dict) else content
        if isinstance(inner, dict):
            inner = inner.get("message") or inner.get("detail") or inner
        text = inner if isinstance(inner, str) else json.dumps(inner)
    return " ".join(text.split())[:MAX_ERROR_CHARS] or "no message"
