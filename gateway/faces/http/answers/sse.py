"""Server-sent events, and cancelling work when its client disconnects."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import aclosing, closing
from functools import partial
from typing import Any, TypeVar

from fastapi import Response
from starlette.types import Receive, Scope, Send

from gateway.faces.http.errors import ClientDisconnected, error_body, error_response, internal_error
from services.runtime.errors import ServiceError

log = logging.getLogger(__name__)

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"
COMMENT = b": ping\n\n"  # which clients skip
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def encode_event(content: object) -> bytes:
    return b"data: " + json.dumps(content, ensure_ascii=False).encode() + b"\n\n"


def encode_typed_event(content: Mapping[str, object]) -> bytes:
    """An event of the name in `type`."""
    return f"event: {content['type']}\n".encode() + encode_event(content)


def encode_error_event(error: ServiceError, path: str) -> bytes:
    """An error within a stream of the endpoint at `path`."""
    body = error_body(error, path)
    return encode_typed_event(body) if "type" in body else encode_event(body)


async def run_until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. Cancels it when the client disconnects; raises ClientDisconnected."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.cancelled() or not working.done():
            raise ClientDisconnected
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)
        del working, watching, task  # the traceback of their error refers to this frame


class Pinger:
    """Sends pings while a stream sends nothing else, so that neither its client nor a proxy in
    between gives it up. `close` ends it."""

    def __init__(self, every_s: float, ping: Callable[[], Coroutine[Any, Any, None]]):
        self.quiet = True  # whether nothing else was sent since the last look
        self._every_s, self._ping = every_s, ping
        self._sending: asyncio.Task[None] | None = None
        self._timer = asyncio.get_running_loop().call_later(every_s, self._look)

    def close(self) -> None:
        self._timer.cancel()
        if self._sending is not None:
            self._sending.cancel()

    def _look(self) -> None:
        if self.quiet and (self._sending is None or self._sending.done()):
            self._sending = asyncio.ensure_future(self._ping())
        self.quiet = True
        self._timer = asyncio.get_running_loop().call_later(self._every_s, self._look)


class EventStream(Response):
    """A stream of server-sent events.

    A failure before the first event or ping becomes an error answer with its status; a later one
    becomes an event at the end of the stream.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes],
        encode_last: Callable[[ServiceError | None], bytes],
        on_end: Callable[[], None],
        ping_s: float,
        ping: bytes = COMMENT,
        headers: Mapping[str, str] | None = None,
    ):
        """`encode_last`: what follows the events, or the error that ends them; an error is encoded
        in a thread. `ping` is sent when there was no event for `ping_s`. `headers` are sent in
        addition to those of every stream."""
        super().__init__()
        self._events, self._encode_last, self._on_end = events, encode_last, on_end
        self._ping_s, self._ping = ping_s, ping
        self._started = False
        more = (headers or {}).items()
        self._all_headers = HEADERS + [(name.encode(), value.encode()) for name, value in more]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await run_until_disconnect(receive, self._send_all(scope, receive, send))
        except ClientDisconnected:
            log.debug("a client disconnected within its stream")
        finally:
            self._on_end()

    async def _send_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        pinger = Pinger(self._ping_s, partial(self._send_piece, send, self._ping))
        async with aclosing(self._events) as events:
            try:
                with closing(pinger):
                    async for data in events:
                        pinger.quiet = False
                        await self._send_piece(send, data)
                last = self._encode_last(None)
                await self._start(send)
            except Exception as error:  # no name keeps it longer: its traceback has this frame
                if not self._started:
                    response = error_response(_for_client(error), scope["path"])
                    await response(scope, receive, send)
                    return
                last = await asyncio.to_thread(self._encode_last, _for_client(error))
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _send_piece(self, send: Send, data: bytes) -> None:
        await self._start(send)
        await send({"type": "http.response.body", "body": data, "more_body": True})

    async def _start(self, send: Send) -> None:
        if not self._started:
            self._started = True
            start = {"type": "http.response.start", "status": 200}
            await send({**start, "headers": self._all_headers})


def _for_client(error: Exception) -> ServiceError:
    """The error that the client receives. Logs an error that is not meant for clients."""
    if isinstance(error, ServiceError):
        return error
    log.exception("a stream failed")
    return internal_error()


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
