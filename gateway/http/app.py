"""The OpenAI API: `build_app` makes it around a gateway."""

import logging
import time
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException

from gateway.http.errors import error_response, unexpected
from gateway.http.generate import chat, complete
from gateway.http.schema import Body, ChatBody, CompletionBody
from gateway.http.sse import ClientGone
from gateway.service import GatewayService
from services.runtime.errors import ServiceError

log = logging.getLogger(__name__)

CLIENT_GONE = 499  # nobody sees it


def build_app(gateway: GatewayService) -> FastAPI:
    """Serve it with `serve_http`, or any ASGI server that calls it on the gateway's event loop."""
    app = FastAPI(title="foretoken", redoc_url=None)
    started_unix_s = int(time.time())

    def model_card() -> dict[str, object]:
        return {
            "id": gateway.config.model_name,
            "object": "model",
            "created": started_unix_s,
            "owned_by": "foretoken",
            "max_model_len": gateway.max_context_tokens,
        }

    @app.post("/v1/completions", openapi_extra=_describe(CompletionBody))
    async def completions(request: Request) -> Response:
        return await complete(gateway, request)

    @app.post("/v1/chat/completions", openapi_extra=_describe(ChatBody))
    async def chat_completions(request: Request) -> Response:
        return await chat(gateway, request)

    @app.get("/v1/models")
    async def models() -> dict[str, object]:
        return {"object": "list", "data": [model_card()]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, object]:
        gateway.check_model(name)
        return model_card()

    @app.get("/health")
    async def health() -> Response:
        if gateway.ready:
            return JSONResponse({"status": "ok"})
        why = "draining" if gateway.draining else "no worker is attached"
        return JSONResponse({"status": why}, 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        exposition = generate_latest(gateway.metrics.registry)
        return Response(exposition, media_type=CONTENT_TYPE_LATEST)

    _handle_errors(app)
    return app


def _handle_errors(app: FastAPI) -> None:
    @app.exception_handler(ServiceError)
    async def service_error(request: Request, error: ServiceError) -> Response:
        return error_response(error)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}"
        body = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
        return JSONResponse({"error": body}, error.status_code, error.headers)

    @app.exception_handler(ClientGone)
    async def client_gone(request: Request, error: ClientGone) -> Response:
        return Response(status_code=CLIENT_GONE)

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> Response:
        return error_response(unexpected())


def _describe(body: type[Body]) -> dict[str, Any]:
    """The body's schema for `/docs`; the endpoint reads the body itself, to bound it."""
    schema = body.model_json_schema()
    return {"requestBody": {"content": {"application/json": {"schema": schema}}, "required": True}}
