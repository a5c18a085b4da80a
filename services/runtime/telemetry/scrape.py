"""Exposes the metrics of a process: over gRPC on every server, and over HTTP if configured."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

from observability.exposition import CONTENT_TYPE, Exposition, Part
from protos.generated import telemetry_pb2, telemetry_pb2_grpc
from services.runtime.config import ConfigError

log = logging.getLogger(__name__)

TELEMETRY = "foretoken.v1.Telemetry"
REQUEST_TIMEOUT_S = 10.0  # to receive a request and send its response


class TelemetryService(telemetry_pb2_grpc.TelemetryServicer):
    """Serves the metrics of `parts`, read on the event loop."""

    def __init__(self, parts: Sequence[Part]):
        self._exposition = Exposition(parts)

    async def Scrape(
        self, request: telemetry_pb2.ScrapeRequest, context: object
    ) -> telemetry_pb2.ScrapeResponse:
        return telemetry_pb2.ScrapeResponse(text=self._exposition.text(request.names))


@asynccontextmanager
async def metrics_over_http(host: str, port: int, parts: Sequence[Part]) -> AsyncIterator[int]:
    """Serves `GET /metrics` during the block, on this event loop. Yields the port; `port` 0 chooses
    a free one. Raises ConfigError if it cannot listen."""
    try:
        server = await asyncio.start_server(_handler(Exposition(parts).text), host, port)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"cannot listen on {host}:{port} for metrics: {reason}") from None
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


def _handler(render: Callable[[], str]) -> Handler:
    """Handles one request per connection: scrapes are seconds apart."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(_response(head, render))
                await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            log.debug("a metrics client disconnected or sent no request")
        finally:
            writer.close()

    return handle


def _response(head: bytes, render: Callable[[], str]) -> bytes:
    method, path, *_ = [*head.split(b"\r\n", 1)[0].split(b" "), b"", b""]
    if path.partition(b"?")[0] != b"/metrics":
        return _encode("404 Not Found", "not found; use GET /metrics\n")
    if method != b"GET":
        return _encode("405 Method Not Allowed", "method not allowed; use GET\n", "Allow: GET\r\n")
    return _encode("200 OK", render())


def _encode(status: str, text: str, headers: str = "") -> bytes:
    body = text.encode()
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {CONTENT_TYPE}\r\nContent-Length: {len(body)}\r\n"
        f"Connection: close\r\n{headers}\r\n"
    )
    return head.encode() + body
