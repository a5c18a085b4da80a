"""The OpenAI API: `build_app` makes it around a gateway."""

import logging
from collections.abc import Collection

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from gateway.faces.http.docs.page import DOCS_PATHS, add_docs
from gateway.faces.http.endpoints import MOST_PATH_CHARS, add_endpoints, described, endpoints, near
from gateway.faces.http.entry.cors import Cors
from gateway.faces.http.entry.heads import Heads
from gateway.faces.http.entry.keys import Keys
from gateway.faces.http.entry.requests import Requests
from gateway.faces.http.errors import ClientGone, error_body, error_response, unexpected
from gateway.faces.http.generate import chat, complete
from gateway.faces.http.schema import ChatBody, CompletionBody
from gateway.faces.ui.routes import PAGE_PATHS, add_page
from gateway.gateway import Gateway
from services.runtime.errors import InvalidArgument, ServiceError
from services.runtime.version import foretoken_version

log = logging.getLogger(__name__)

CLIENT_GONE = 499  # nobody sees it
NOT_FOUND, NOT_ALLOWED = 404, 405
OPEN = frozenset(("/", "/health", "/ping", "/version", "/openapi.json"))  # to all, keys or not
COUNTS = frozenset(("/metrics", "/load"))


def build_app(gateway: Gateway) -> ASGIApp:
    """Serve it with `serve_http`, or any ASGI server that calls it on the gateway's event loop."""
    app = FastAPI(title="foretoken", version=foretoken_version(), docs_url=None, redoc_url=None)

    @app.post(
        "/v1/chat/completions",
        summary="Answer a conversation, whole or as a stream of events",
        openapi_extra=described(ChatBody.model_json_schema(), CHAT),
    )
    async def chat_completions(request: Request) -> Response:
        return await chat(gateway, request)

    @app.post(
        "/v1/completions",
        summary="Go on with a prompt, whole or as a stream of events",
        openapi_extra=described(CompletionBody.model_json_schema(), COMPLETION),
    )
    async def completions(request: Request) -> Response:
        return await complete(gateway, request)

    add_endpoints(app, gateway)
    add_docs(app)
    if gateway.config.ui:
        add_page(app, gateway)
    _handle_errors(app)
    return _behind_entry(app, gateway)


CHAT = {"messages": [{"role": "user", "content": "Hello"}], "stream": True}
COMPLETION = {"prompt": "Hello", "max_tokens": 16}


def _behind_entry(app: ASGIApp, gateway: Gateway) -> ASGIApp:
    """What each request passes, the last first."""
    config = gateway.config
    open_paths: Collection[str] = OPEN | DOCS_PATHS | PAGE_PATHS
    if config.metrics_open:
        open_paths = {*open_paths, *COUNTS}
    entry: ASGIApp = Keys(Heads(app), gateway.keyring, open_paths)
    if config.cors_origins:
        entry = Cors(entry, config.cors_origins)
    return Requests(entry)


def _handle_errors(app: FastAPI) -> None:
    known = list(endpoints(app))

    @app.exception_handler(ServiceError)
    async def service_error(request: Request, error: ServiceError) -> Response:
        return error_response(error)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        path, headers = request.url.path[:MOST_PATH_CHARS], dict(error.headers or {})
        message = f"{request.method} {path}: {error.detail}"
        if error.status_code == NOT_FOUND:
            meant = " or ".join(near(path, known))
            message += f"; did you mean {meant}?" if meant else "; / says what there is"
        if error.status_code == NOT_ALLOWED and "GET" in headers.get("Allow", ""):
            headers["Allow"] += ", HEAD"
        return JSONResponse(error_body(InvalidArgument("", message)), error.status_code, headers)

    @app.exception_handler(ClientGone)
    async def client_gone(request: Request, error: ClientGone) -> Response:
        return Response(status_code=CLIENT_GONE)

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> Response:
        return error_response(unexpected())
