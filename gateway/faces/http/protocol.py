"""Connection limits and header timeouts of the HTTP listener, with errors in OpenAI's format."""

import asyncio
import json
import sys
from http import HTTPStatus
from typing import Any
from uuid import uuid4

import h11
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from gateway.admission.caller import REQUEST_ID
from gateway.faces.http.errors import error_body, error_response
from gateway.faces.http.middleware import RequestGuard
from services.runtime.errors import Code, InvalidArgument, ServiceError

MAX_REFUSED = 64  # connections above the limit that get a 503; further ones are closed
RETRY_AFTER_S = 1.0
BEFORE_ANSWER = (h11.IDLE, h11.SEND_RESPONSE)


class BoundedProtocol(H11Protocol):
    """One connection.

    It may be idle for `keep_alive_s`. From the first byte of a request, all headers must arrive
    within `header_wait_s`; so must the rest of a body behind an answer that is already sent. A
    connection above `max_connections` gets a 503.
    """

    def __init__(self, *args: Any, max_connections: int, header_wait_s: float, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._max_connections, self._header_wait_s = max_connections, header_wait_s
        self._timer: asyncio.TimerHandle | None = None  # runs while headers are incomplete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # H11Protocol narrows it, too
        super().connection_made(transport)
        over = len(self.connections) - self._max_connections
        if over > MAX_REFUSED:
            transport.abort()
        elif over > 0:
            self.app = REFUSE_CONNECTION
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._incomplete and not self._answering:
            self._start_timer()
        else:
            self._stop_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY:  # the rest of a body that no endpoint reads
            self._start_timer()

    def send_400_response(self, msg: str) -> None:
        """Answers invalid HTTP and headers above the size limit."""
        error = sys.exception()
        hint = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        self._refuse(hint, f"{msg[:-1]}: {error}" if error else msg)

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def _incomplete(self) -> bool:
        """Whether an incomplete request has arrived."""
        return self.conn.their_state is not h11.IDLE or bool(self.conn.trailing_data[0])

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self._header_wait_s, self._on_timeout)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timeout(self) -> None:
        self._timer = None
        if self._answering or self.transport.is_closing():
            return
        if self.conn.their_state is h11.IDLE and self._incomplete:
            self._refuse(408, f"the headers did not arrive within {self._header_wait_s:g} s")
        else:
            self.transport.close()

    def _refuse(self, status: int, message: str) -> None:
        if self.conn.our_state in BEFORE_ANSWER:
            body = json.dumps(error_body(InvalidArgument("", message))).encode()
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                (b"connection", b"close"),
                (REQUEST_ID.encode(), uuid4().hex.encode()),
            ]
            reason = HTTPStatus(status).phrase.encode()
            head = h11.Response(status_code=status, headers=headers, reason=reason)
            for part in (head, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(part) or b"")
        self.transport.close()


async def _refuse_connection(scope: Scope, receive: Receive, send: Send) -> None:
    error = ServiceError(Code.UNAVAILABLE, "too many connections; retry later", RETRY_AFTER_S)
    response = error_response(error)
    response.headers["connection"] = "close"
    await response(scope, receive, send)


REFUSE_CONNECTION = RequestGuard(_refuse_connection)
