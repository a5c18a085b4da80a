"""The ASGI layers around the endpoints: request id and last answer, CORS, API keys, HEAD."""

import asyncio
import logging
from collections.abc import Container, Sequence

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.admission.caller import REQUEST_ID, bind_caller, current_caller
from gateway.admission.key_limits import RATE_HEADERS
from gateway.admission.keyring import Keyring
from gateway.config import ANY_ORIGIN
from gateway.faces.http.answers.sse import encode_error_event
from gateway.faces.http.errors import MESSAGES_PATH, error_body, error_response
from gateway.types.api_keys import Unauthenticated, parse_bearer
from services.runtime.errors import Code, InvalidArgument, ServiceError

log = logging.getLogger(__name__)

KEY_HEADER = "x-api-key"  # Anthropic's, beside Authorization
MESSAGES_REQUEST_ID = "request-id"  # Anthropic's, beside x-request-id
EVENT_STREAM = b"text/event-stream"
LAST_MESSAGE_S = 1.0  # to send the answer of a cancelled request
EXPOSED_HEADERS = (
    REQUEST_ID,
    MESSAGES_REQUEST_ID,
    "retry-after",
    "www-authenticate",
    *RATE_HEADERS,
)
PREFLIGHT_MAX_AGE_S = 600


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
        caller = bind_caller(Headers(scope=scope).get(REQUEST_ID, ""))
        names = [REQUEST_ID]
        if scope["path"].startswith(MESSAGES_PATH):
            names.append(MESSAGES_REQUEST_ID)
        named = [(name.encode(), caller.request_id.encode()) for name in names]
        started: Message | None = None
        ended = False

        async def send_with_id(message: Message) -> None:
            nonlocal started, ended
            if message["type"] == "http.response.start":
                started = message
                message["headers"] = [*message.get("headers", ()), *named]
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
                await error_response(error, scope["path"])(scope, receive, send)
            elif any(value.startswith(EVENT_STREAM) for _, value in started["headers"]):
                body = encode_error_event(error, scope["path"])
                await send({"type": "http.response.body", "body": body})
    except TimeoutError:
        log.info("a client did not read the answer of its cancelled request")


class Cors(CORSMiddleware):
    """Starlette's middleware with JSON errors. Credentials, such as a proxy's cookies, are allowed
    from named origins but not with `*`."""

    def __init__(self, app: ASGIApp, origins: Sequence[str]):
        super().__init__(
            app,
            allow_origins=origins,
            allow_methods=("GET", "HEAD", "POST", "DELETE"),
            allow_headers=("*",),
            allow_credentials=ANY_ORIGIN not in origins,
            expose_headers=EXPOSED_HEADERS,
            max_age=PREFLIGHT_MAX_AGE_S,
        )

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        if response.status_code < 400:
            return response
        error = InvalidArgument("", bytes(response.body).decode())
        headers = {k: v for k, v in response.headers.items() if not k.startswith("content-")}
        return JSONResponse(error_body(error), response.status_code, headers)


class KeyAuthentication:
    """Rejects requests without a valid API key before their body is read. Every path, existing or
    not, that is not in `open_paths` needs a key."""

    def __init__(self, app: ASGIApp, keyring: Keyring, open_paths: Container[str]):
        self._app, self._keyring, self._open_paths = app, keyring, open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        respond = self._app
        needs_key = self._keyring.required and scope["type"] == "http"
        if needs_key and scope["path"] not in self._open_paths:
            headers = Headers(scope=scope)
            key = parse_bearer(headers.get("authorization", "")) or headers.get(KEY_HEADER, "")
            try:
                bind_caller(current_caller().request_id, self._keyring.check(key))
            except Unauthenticated as refusal:
                if refusal.given:
                    host, *_ = scope.get("client") or ("an unknown client",)
                    log.warning("%s sent a wrong API key", host)
                respond = error_response(refusal, scope["path"])
        await respond(scope, receive, send)


class HeadMethod:
    """Runs a HEAD request as GET and drops the body. The headers keep the body's length."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_without_body(message: Message) -> None:
            await send({**message, "body": b""} if "body" in message else message)

        await self._app({**scope, "method": "GET"}, receive, send_without_body)
