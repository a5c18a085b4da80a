"""Connection limits and header timeouts of the HTTP listener, with errors in OpenAI's format."""

import asyncio
import json
import sys
import time
from collections import Counter, deque
from http import HTTPStatus
from typing import Any
from uuid import uuid4

import httptools
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from gateway.admission.caller import REQUEST_ID
from gateway.faces.http.answers.direct import HEAD_READ_S, STREAM, DirectStream
from gateway.faces.http.errors import error_body, error_response
from gateway.faces.http.middleware import RequestGuard
from services.runtime.errors import Code, InvalidArgument, ServiceError

MAX_REFUSED = 64  # connections above the limit that get a 503; further ones are closed
RETRY_AFTER_S = 1.0
BAD_REQUEST, REQUEST_TIMEOUT, HEADERS_TOO_LARGE = 400, 408, 431


class ClientConnections(Counter[str]):
    """The number of open connections of each client address."""

    def __init__(self, limit: int):
        super().__init__()
        self.limit = limit

    def leave(self, address: str) -> None:
        self[address] -= 1
        if not self[address]:
            del self[address]


class BoundedProtocol(HttpToolsProtocol):
    """One connection.

    It may be idle for `keep_alive_s`. From the first byte of a request, all headers must arrive
    within `header_wait_s`; so must the rest of a body behind an answer that is already sent.
    Headers, and what is between the pieces of a body, are bounded by `max_header_bytes`. A
    connection above `max_connections`, or above the limit of its client's address, gets a 503. A
    client that reads nothing of what waits for it within `stall_s` is disconnected. Requests can
    write their answer directly: `gateway.faces.http.answers.direct`.
    """

    def __init__(
        self,
        *args: Any,
        max_connections: int,
        clients: ClientConnections,
        max_header_bytes: int,
        header_wait_s: float,
        stall_s: float,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        self._max_connections, self._max_header_bytes = max_connections, max_header_bytes
        self._header_wait_s, self._stall_s = header_wait_s, stall_s
        self._clients, self._address = clients, ""
        self._stall: asyncio.TimerHandle | None = None  # runs while the client reads too little
        self._unread_bytes = 0  # when that timer began
        self._timer: asyncio.TimerHandle | None = None  # runs while headers are incomplete
        self._cycles: deque[RequestResponseCycle] = deque()  # not answered yet, in order
        self._in_head = self._completed = False
        self._fed = self._unparsed = b""
        self._head_bytes = 0  # received since the last headers, body piece, or end of a request

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # HttpToolsProtocol narrows it, too
        super().connection_made(transport)
        self._address = self.client[0] if self.client else ""
        self._clients[self._address] += 1
        over = max(
            len(self.connections) - self._max_connections,
            self._clients[self._address] - self._clients.limit,
        )
        if over > MAX_REFUSED:
            transport.abort()
        elif over > 0:
            self.app = REFUSE_CONNECTION
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        self._completed = False
        self._head_bytes += len(data)
        self._unparsed = data
        while self._unparsed and self.parser is not None:
            self._fed, self._unparsed = self._unparsed, b""
            super().data_received(self._fed)
        if self._head_bytes > self._max_header_bytes:
            limit = f"its headers exceed {self._max_header_bytes} bytes"
            self._refuse(HEADERS_TOO_LARGE, f"Invalid HTTP request received: {limit}")
        elif self._answering:
            self._stop_timer()
        elif self._completed:  # the rest of a body that no endpoint read
            self._stop_timer()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )
        else:
            self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_stall()
        self._clients.leave(self._address)
        self._disconnect_cycles()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_stall()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_stall()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # else a trailer, which no endpoint reads
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.get_method() == b"CONNECT":
            raise ValueError("this server is no proxy")
        if self.parser.should_upgrade():
            return  # the request is parsed again
        self._in_head, self._head_bytes = False, 0
        if self.parser.get_http_version() == "1.1" and not any(
            name == b"host" for name, _ in self.headers
        ):
            raise ValueError("the Host header is missing")
        super().on_headers_complete()  # creates the cycle, which runs later
        self._cycles.append(self.cycle)
        extensions: dict[str, Any] = {
            STREAM: DirectStream(self.cycle),
            HEAD_READ_S: time.monotonic(),
        }
        self.scope["extensions"] = extensions

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._completed, self._head_bytes = True, 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if self._cycles:
            self._cycles.popleft()
        super().on_response_complete()
        if self.cycle.more_body:  # the rest of a body that no endpoint reads
            self._unset_keepalive_if_required()
            self._start_timer()

    def _unsupported_upgrade_warning(self) -> None:
        """Answers a request that offers another protocol, such as h2c, as one that does not.

        The parser stops behind the headers of an offer, as if the body were the other protocol's.
        """
        error = sys.exception()
        assert error is not None
        lines = [b"%b: %b\r\n" % header for header in self.headers if header[0] != b"upgrade"]
        first = b"%b %b HTTP/1.1\r\n" % (self.parser.get_method(), self.url)
        self._unparsed = b"".join((first, *lines, b"\r\n", self._fed[error.args[0] :]))
        self.parser = httptools.HttpRequestParser(self)

    def send_400_response(self, msg: str) -> None:
        """Answers invalid HTTP."""
        error = sys.exception()
        reason = error and (error.__context__ or error)  # of an error in a callback
        self._refuse(BAD_REQUEST, f"{msg[:-1]}: {reason}" if reason else msg)

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self._header_wait_s, self._on_timeout)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _disconnect_cycles(self) -> None:
        """Ends every request of the connection. uvicorn itself ends only the last of them, and
        others would write to a closed transport."""
        for cycle in self._cycles:
            cycle.disconnected = True
            cycle.message_event.set()
        self._cycles.clear()

    def _watch_stall(self) -> None:
        self._unread_bytes = self.transport.get_write_buffer_size()
        self._stall = self.loop.call_later(self._stall_s, self._on_stall)

    def _stop_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _on_stall(self) -> None:
        if self.transport.get_write_buffer_size() < self._unread_bytes:
            self._watch_stall()
        else:
            self.transport.abort()

    def _on_timeout(self) -> None:
        self._timer = None
        if self._answering or self.transport.is_closing():
            return
        if self._in_head:
            wait_s = self._header_wait_s
            self._refuse(REQUEST_TIMEOUT, f"the headers did not arrive within {wait_s:g} s")
        else:
            self.transport.close()

    def _refuse(self, status: int, message: str) -> None:
        """Closes the connection, with an answer unless one has begun."""
        if not self._answering or not self.cycle.response_started:
            body = json.dumps(error_body(InvalidArgument("", message))).encode()
            head = (
                f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n"
                f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
                f"connection: close\r\n{REQUEST_ID}: {uuid4().hex}\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.transport.close()
        self._disconnect_cycles()


async def _refuse_connection(scope: Scope, receive: Receive, send: Send) -> None:
    error = ServiceError(Code.UNAVAILABLE, "too many connections; retry later", RETRY_AFTER_S)
    response = error_response(error)
    response.headers["connection"] = "close"
    await response(scope, receive, send)


REFUSE_CONNECTION = RequestGuard(_refuse_connection)
