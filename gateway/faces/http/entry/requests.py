"""The outermost of the app: every request gets an id, and an answer, even when it is cancelled."""

import asyncio
import logging

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.admission.caller import REQUEST_ID, introduce
from gateway.faces.http.answers.sse import event
from gateway.faces.http.errors import error_body, error_response
from services.runtime.errors import Code, ServiceError

log = logging.getLogger(__name__)

EVENTS = b"text/event-stream"
LAST_WORDS_S = 1.0  # for an end to be written, of who is cancelled


class Requests:
    """Tells every answer's client the id of its request. A request that is cancelled, as all are
    that outlast the drain, is answered 503, or with an error event where its stream has begun."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        calling = introduce(Headers(scope=scope).get(REQUEST_ID, ""))
        header = (REQUEST_ID.encode(), calling.request_id.encode())
        began: Message | None = None
        ended = False

        async def tell(message: Message) -> None:
            nonlocal began, ended
            if message["type"] == "http.response.start":
                began = message
                message["headers"] = [*message.get("headers", ()), header]
            else:
                ended = not message.get("more_body", False)
            await send(message)

        try:
            await self._app(scope, receive, tell)
        except asyncio.CancelledError:
            if not ended:
                log.info("a request was cancelled: the server shuts down")
                await _end(began, scope, receive, tell)


async def _end(began: Message | None, scope: Scope, receive: Receive, send: Send) -> None:
    why = ServiceError(Code.UNAVAILABLE, "shutting down; retry elsewhere", 1.0)
    try:
        async with asyncio.timeout(LAST_WORDS_S):
            if began is None:
                await error_response(why)(scope, receive, send)
            elif any(value.startswith(EVENTS) for _, value in began["headers"]):
                await send({"type": "http.response.body", "body": event(error_body(why))})
    except TimeoutError:
        log.info("its client took nothing any more")
