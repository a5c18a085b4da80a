"""What uvicorn leaves to the proxy before it: how many connections there may be, how long a request
may take to say what it is, and refusals that clients understand."""

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
from gateway.faces.http.entry.requests import Requests
from gateway.faces.http.errors import error_body, error_response
from services.runtime.errors import Code, InvalidArgument, ServiceError

SPARE = 64  # connections over the bound that are still told so; more are cut
RETRY_S = 1.0
BEFORE_ANSWER = (h11.IDLE, h11.SEND_RESPONSE)


class BoundedProtocol(H11Protocol):
    """One connection. It may be idle for as long as `keep_alive_s` says; but from its first byte of
    a request, `header_wait_s` are for all of its headers, however they come, and as long for what
    comes behind an answer that is out. A connection over the bound is told 503."""

    def __init__(self, *args: Any, max_connections: int, header_wait_s: float, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._max_connections, self._header_wait_s = max_connections, header_wait_s
        self._late: asyncio.TimerHandle | None = None  # while a request has begun and says not what

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # H11Protocol narrows it, too
        super().connection_made(transport)
        over = len(self.connections) - self._max_connections
        if over > SPARE:
            transport.abort()
        elif over > 0:
            self.app = FULL
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._begun and not self._answering:
            self._watch()
        else:
            self._unwatch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY:  # the rest of a body that nobody wanted
            self._watch()

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP, or too much of it."""
        error = sys.exception()
        hint = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        self._refuse(hint, f"{msg[:-1]}: {error}" if error else msg)

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def _begun(self) -> bool:
        """Whether something came that is not all there."""
        return self.conn.their_state is not h11.IDLE or bool(self.conn.trailing_data[0])

    def _watch(self) -> None:
        if self._late is None:
            self._late = self.loop.call_later(self._header_wait_s, self._on_late)

    def _unwatch(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _on_late(self) -> None:
        self._late = None
        if self._answering or self.transport.is_closing():
            return
        if self.conn.their_state is h11.IDLE and self._begun:
            self._refuse(408, f"the headers took over {self._header_wait_s:g} s")
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


async def _full(scope: Scope, receive: Receive, send: Send) -> None:
    why = ServiceError(Code.UNAVAILABLE, "there are too many connections; retry later", RETRY_S)
    answer = error_response(why)
    answer.headers["connection"] = "close"
    await answer(scope, receive, send)


FULL = Requests(_full)
