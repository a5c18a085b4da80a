"""Answers that outlive their first byte: event streams, and watching for a client that leaves."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import Response
from starlette.types import Receive, Scope, Send

from gateway.faces.http.errors import ClientGone, error_body, error_response, unexpected
from services.runtime.errors import ServiceError

log = logging.getLogger(__name__)

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def event(content: object) -> bytes:
    return b"data: " + json.dumps(content, ensure_ascii=False).encode() + b"\n\n"


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work`, cancelled as soon as the client hangs up; raises ClientGone then."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.cancelled() or not working.done():  # let go, or gone by itself
            raise ClientGone
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


class EventStream(Response):
    """Server-sent events. What fails before the first becomes a whole error answer with its
    status; what fails later, an error event and the end of the stream."""

    def __init__(
        self,
        events: AsyncGenerator[bytes],
        on_end: Callable[[], None],
        headers: Mapping[str, str] | None = None,
    ):
        """`headers` go beside those of every stream."""
        super().__init__()
        self._events, self._on_end = events, on_end
        more = (headers or {}).items()
        self._all_headers = HEADERS + [(name.encode(), value.encode()) for name, value in more]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(receive, self._send_all(scope, receive, send))
        except ClientGone:
            log.debug("a client hung up")
        finally:
            self._on_end()

    async def _send_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        async with aclosing(self._events) as events:
            try:
                async for data in events:
                    if not started:
                        start = {"type": "http.response.start", "status": 200}
                        await send({**start, "headers": self._all_headers})
                        started = True
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                last = DONE
            except Exception as error:
                failure = error if isinstance(error, ServiceError) else unexpected()
                if failure is not error:
                    log.exception("a stream failed")
                if not started:
                    await error_response(failure)(scope, receive, send)
                    return
                last = event(error_body(failure))
        await send({"type": "http.response.body", "body": last, "more_body": False})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
