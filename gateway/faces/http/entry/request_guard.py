"""The outermost layer: every request has an id and gets an answer, even if it is cancelled."""

import asyncio
import logging

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.admission.caller import REQUEST_ID, bind_caller
from gateway.faces.http.answers.sse import encode_event
from gateway.faces.http.errors import error_body, error_response
from services.runtime.errors import Code, ServiceError

log = logging.getLogger(__name__)

EVENT_STREAM = b"text/event-stream"
LAST_MESSAGE_S = 1.0  # to send the answer of a cancelled request


class RequestGuard:
    """Adds the request id to every answer.

    A cancelled request, such as one that outlasts the drain, gets a 503, or an error event if its
    stream has begun.
    """

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        calling = bind_caller(Headers(scope=scope).get(REQUEST_ID, ""))
        header = (REQUEST_ID.encode(), calling.request_id.encode())
        started: Message | None = None
        ended = False

        async def send_with_id(message: Message) -> None:
            nonlocal started, ended
            if message["type"] == "http.response.start":
                started = message
                message["headers"] = [*message.get("headers", ()), header]
            else:
                ended = not message.get("more_body", False)
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except asyncio.CancelledError:
            if not ended:
                log.info("a request was cancelled because the server shuts down")
                await _send_shutdown(started, scope, receive, send_with_id)


async def _send_shutdown(
    started: Message | None, scope: Scope, receive: Receive, send: Send
) -> None:
    error = ServiceError(Code.UNAVAILABLE, "shutting down; retry elsewhere", 1.0)
    try:
        async with asyncio.timeout(LAST_MESSAGE_S):
            if started is None:
                await error_response(error)(scope, receive, send)
            elif any(value.startswith(EVENT_STREAM) for _, value in started["headers"]):
                body = encode_event(error_body(error))
                await send({"type": "http.response.body", "body": body})
    except TimeoutError:
        log.info("a client did not read the answer of its cancelled request")
