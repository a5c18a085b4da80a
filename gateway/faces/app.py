"""The OpenAI API of a front, as an ASGI application."""

import logging

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, RedirectResponse
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Scope

from gateway.faces.http.batches.endpoints import add_batches
from gateway.faces.http.choices import CHAT, COMPLETIONS
from gateway.faces.http.describe import STREAMED, complete_description, describe_body
from gateway.faces.http.embeddings.endpoints import add_embeddings
from gateway.faces.http.endpoints import add_endpoints, list_endpoints
from gateway.faces.http.errors import ClientDisconnected, error_body, error_response, internal_error
from gateway.faces.http.generate import generate
from gateway.faces.http.hot_paths import CLIENT_CLOSED_REQUEST, Endpoints, HotPaths
from gateway.faces.http.messages.endpoints import add_messages
from gateway.faces.http.middleware import Cors, HeadMethod, KeyAuthentication, RequestGuard
from gateway.faces.http.responses.endpoints import add_responses
from gateway.faces.http.schema import ChatBody, CompletionBody
from gateway.faces.http.unserved import MAX_PATH_CHARS, UNSERVED_METHODS, suggest_endpoint
from gateway.faces.static import Page, add_page, read_page
from gateway.faces.ui.routes import add_data
from gateway.front import Front
from services.runtime.errors import InvalidArgument, ServiceError
from services.runtime.version import foretoken_version

log = logging.getLogger(__name__)

CHAT_PATH, COMPLETION_PATH = "/v1/chat/completions", "/v1/completions"
NOT_FOUND, METHOD_NOT_ALLOWED = 404, 405
OPEN_PATHS = frozenset(("/", "/health", "/ping", "/version", "/openapi.json"))  # need no API key
METRIC_PATHS = frozenset(("/metrics", "/load"))
CHAT_EXAMPLE = {"messages": [{"role": "user", "content": "Hello"}], "stream": True}
COMPLETION_EXAMPLE = {"prompt": "Hello", "max_tokens": 16}


def build_app(front: Front) -> ASGIApp:
    """Serve it with `serve_http` or any ASGI server that runs on the front's event loop, and run
    `run_batches` beside it. Raises ConfigError if the folder of batches cannot be written."""
    app = FastAPI(title="foretoken", version=foretoken_version(), docs_url=None, redoc_url=None)

    @app.post(
        CHAT_PATH,
        summary="Answer a conversation, complete or streamed",
        openapi_extra=describe_body(ChatBody, CHAT_EXAMPLE),
        responses=STREAMED,
    )
    async def chat_completions(request: Request) -> Response:
        return await generate(front, request, CHAT)

    @app.post(
        COMPLETION_PATH,
        summary="Continue a prompt, complete or streamed",
        openapi_extra=describe_body(CompletionBody, COMPLETION_EXAMPLE),
        responses=STREAMED,
    )
    async def completions(request: Request) -> Response:
        return await generate(front, request, COMPLETIONS)

    often = {
        **add_responses(app, front),
        **add_messages(app, front),
        **add_endpoints(app, front),
    }
    add_batches(app, front)
    add_embeddings(app, front)
    docs, page = read_page("/docs", "gateway.faces.docs", "static"), read_live_page()
    add_page(app, docs)
    if front.config.ui:
        add_data(app, front)
        add_page(app, page)  # after the data: its route matches any name

        @app.get("/ui", include_in_schema=False)
        async def folder() -> Response:
            return RedirectResponse("ui/")

    app.openapi_schema = complete_description(app.openapi())
    _add_error_handlers(app)
    hot = {
        ("POST", CHAT_PATH): chat_completions,
        ("POST", COMPLETION_PATH): completions,
        **often,
    }
    return _add_middleware(app, front, hot, {*docs.paths, *page.paths})


def read_live_page() -> Page:
    """The live page, without its data."""
    return read_page("/ui/", "gateway.faces.ui", "page")


def _add_middleware(app: ASGIApp, front: Front, hot: Endpoints, page_paths: set[str]) -> ASGIApp:
    """Wraps the app; the last layer receives a request first. `page_paths` need no API key."""
    config = front.config
    open_paths = {*OPEN_PATHS, *page_paths, *(METRIC_PATHS if config.metrics_open else ())}
    entry: ASGIApp = KeyAuthentication(HeadMethod(HotPaths(app, hot)), front.keyring, open_paths)
    if config.cors_origins:
        entry = Cors(entry, config.cors_origins)
    return RequestGuard(entry)


def _allowed_methods(app: FastAPI, scope: Scope) -> str:
    """The methods of a path, of all its routes: the framework names those of the first one."""
    named = {
        method
        for route in app.routes
        if isinstance(route, Route) and route.matches(scope)[0] is Match.PARTIAL
        for method in route.methods or ()
    }
    return ", ".join(sorted(named | {"HEAD"} if "GET" in named else named))


def _add_error_handlers(app: FastAPI) -> None:
    served = list(list_endpoints(app))

    @app.exception_handler(ServiceError)
    async def service_error(request: Request, error: ServiceError) -> Response:
        return error_response(error, request.scope["path"])

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        headers = dict(error.headers or {})
        path = request.url.path[:MAX_PATH_CHARS]
        message = f"{request.method} {path}: {error.detail}"
        if error.status_code == NOT_FOUND:
            suggestion = suggest_endpoint(path, served)
            message = f"{request.method} {path} is not served: {suggestion}"
        if error.status_code == METHOD_NOT_ALLOWED:
            headers["Allow"] = _allowed_methods(app, request.scope)
            advice = UNSERVED_METHODS.get((request.method, path))
            message = f"{path} does not allow {request.method}; use {headers['Allow']}"
            message = f"{request.method} {path} is not served: {advice}" if advice else message
        body = error_body(InvalidArgument("", message), path, error.status_code)
        return JSONResponse(body, error.status_code, headers)

    @app.exception_handler(ClientDisconnected)
    async def client_disconnected(request: Request, error: ClientDisconnected) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    @app.exception_handler(Exception)
    async def unexpected_error(request: Request, error: Exception) -> Response:
        return error_response(internal_error(), request.scope["path"])
