"""What the server says of itself, and what there is to ask it for."""

import time
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, RedirectResponse

from gateway.faces.http.tokens import DetokenizeBody, TokenizeBody, detokenize, tokenize
from gateway.gateway import Gateway
from observability.exposition import CONTENT_TYPE
from services.runtime.version import foretoken_version

ABOUT = "foretoken serves LLMs and keeps SLAs by foreseeing how long each answer will be."
MOST_NEAR = 3
MOST_PATH_CHARS = 100  # of one that is compared, or told again


def add_endpoints(app: FastAPI, gateway: Gateway) -> None:
    """All but the two that answer prompts."""
    _add_models(app, gateway)
    _add_tokens(app, gateway)
    _add_states(app, gateway)

    @app.get("/", summary="What this is, and where to look")
    async def root(request: Request) -> Response:
        if "text/html" in request.headers.get("accept", ""):
            return RedirectResponse("ui/" if gateway.config.ui else "docs", headers=BY_ACCEPT)
        told = {"name": "foretoken", "version": foretoken_version(), "about": ABOUT}
        places = {"docs": "/docs", "openapi": "/openapi.json"}
        page = {"ui": "/ui/"} if gateway.config.ui else {}
        told_all = {**told, **places, **page, "endpoints": endpoints(app)}
        return JSONResponse(told_all, headers=BY_ACCEPT)


BY_ACCEPT = {"vary": "accept"}


def _add_models(app: FastAPI, gateway: Gateway) -> None:
    started_unix_s = int(time.time())

    def model_card() -> dict[str, object]:
        return {
            "id": gateway.config.model_name,
            "object": "model",
            "created": started_unix_s,
            "owned_by": "foretoken",
            "max_model_len": gateway.max_context_tokens,
        }

    @app.get("/v1/models", summary="The models that are served")
    async def models() -> dict[str, object]:
        return {"object": "list", "data": [model_card()]}

    @app.get("/v1/models/{name:path}", summary="One of them")
    async def model(name: str) -> dict[str, object]:
        gateway.check_model(name)
        return model_card()


def _add_tokens(app: FastAPI, gateway: Gateway) -> None:
    asked = described(TokenizeBody.model_json_schema(), {"prompt": "Hello"})

    @app.post("/tokenize", summary="The tokens of a prompt or conversation", openapi_extra=asked)
    async def to_tokens(request: Request) -> Response:
        return await tokenize(gateway, request)

    given = described(DetokenizeBody.model_json_schema(), {"tokens": [1, 2, 3]})

    @app.post("/detokenize", summary="The text of tokens", openapi_extra=given)
    async def to_text(request: Request) -> Response:
        return await detokenize(gateway, request)


def _add_states(app: FastAPI, gateway: Gateway) -> None:
    @app.get("/health", summary="Whether a request would be taken: 200, or 503 and why not")
    async def health() -> Response:
        if gateway.ready:
            return JSONResponse({"status": "ok"})
        why = "draining" if gateway.draining else "no worker is attached"
        return JSONResponse({"status": why}, 503)

    @app.get("/ping", summary="As /health, for who calls it so")
    async def ping() -> Response:
        return await health()

    @app.post("/ping", include_in_schema=False)
    async def post_ping() -> Response:
        return await health()

    @app.get("/version", summary="Of foretoken")
    async def version() -> dict[str, str]:
        return {"version": foretoken_version()}

    @app.get("/load", summary="Choices that are being answered")
    async def load() -> dict[str, int]:
        return {"server_load": gateway.live}

    @app.get("/metrics", summary="What Prometheus reads")
    async def metrics() -> Response:
        return Response(await gateway.scrapes.text(), media_type=CONTENT_TYPE)


def described(schema: dict[str, Any], example: Mapping[str, object]) -> dict[str, Any]:
    """A body for `/docs`; the endpoints read theirs by themselves, to bound them."""
    content = {"schema": schema, "example": example}
    return {"requestBody": {"content": {"application/json": content}, "required": True}}


def endpoints(app: FastAPI) -> Mapping[str, str]:
    """What each path of the API is for."""
    return {
        path: "; ".join(method.get("summary", "") for method in methods.values())
        for path, methods in app.openapi()["paths"].items()
    }


def near(path: str, known: Sequence[str]) -> Sequence[str]:
    """Paths that may have been meant: with a part that is missing or too much, or spelled alike."""
    asked = path[:MOST_PATH_CHARS].rstrip("/")
    parts = [each for each in known if each.endswith(asked) or asked.endswith(each)]
    meant = parts if len(asked) > 1 else []
    return (meant or get_close_matches(asked, known, n=MOST_NEAR))[:MOST_NEAR]
