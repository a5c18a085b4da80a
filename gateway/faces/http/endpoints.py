"""The endpoints that generate no text: models, tokens, health, metrics."""

import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse, RedirectResponse

from gateway.faces.http.adapters import add_adapters
from gateway.faces.http.describe import describe_body
from gateway.faces.http.hot_paths import Endpoint, Endpoints
from gateway.faces.http.tokens import DetokenizeBody, TokenizeBody, detokenize, tokenize
from gateway.front import Front
from gateway.gateway import Gateway
from observability.exposition import CONTENT_TYPE
from services.runtime.errors import InvalidArgument
from services.runtime.version import foretoken_version

ABOUT = "foretoken serves LLMs with latency SLAs by forecasting the length of each answer."
BY_ACCEPT = {"vary": "accept"}
METRICS_PATH = "/metrics"
MAX_NAMES = 64  # of the series that a scrape asks for
OK = "ok"
TO_PAGE: dict[int | str, dict[str, Any]] = {307: {"description": "A browser gets a page"}}
_STATES = {"schema": {"type": "object", "required": ["status", "models"]}}
NOT_READY: dict[int | str, dict[str, Any]] = {
    503: {"description": "No model accepts requests", "content": {"application/json": _STATES}}
}
ANTHROPIC_HEADER = "anthropic-version"  # of Anthropic's clients


def add_endpoints(app: FastAPI, front: Front) -> Endpoints:
    """Returns those that are asked often."""
    _add_models(app, front)
    _add_tokens(app, front)
    add_adapters(app, front)
    _add_status(app, front)
    metrics = _add_metrics(app, front)

    @app.get("/", summary="Name, version and endpoints of this server", responses=TO_PAGE)
    async def root(request: Request) -> Response:
        if "text/html" in request.headers.get("accept", ""):
            return RedirectResponse("ui/" if front.config.ui else "docs", headers=BY_ACCEPT)
        content = {
            "name": "foretoken",
            "version": foretoken_version(),
            "about": ABOUT,
            "docs": "/docs",
            "openapi": "/openapi.json",
            **({"ui": "/ui/"} if front.config.ui else {}),
            "endpoints": list_endpoints(app),
        }
        return JSONResponse(content, headers=BY_ACCEPT)

    return {("GET", METRICS_PATH): metrics}


def _add_models(app: FastAPI, front: Front) -> None:
    started_unix_s = int(time.time())

    def model_card(gateway: Gateway) -> dict[str, object]:
        return {
            "id": gateway.config.model_name,
            "object": "model",
            "created": started_unix_s,
            "owned_by": "foretoken",
            "max_model_len": gateway.max_context_tokens,
        }

    def adapter_card(gateway: Gateway, name: str) -> dict[str, object]:
        about = {"id": name, "parent": gateway.config.model_name, "root": gateway.adapters[name]}
        return model_card(gateway) | about

    @app.get("/v1/models", summary="The served models, and their LoRA adapters")
    async def models(request: Request) -> dict[str, object]:
        gateways = front.gateways.values()
        cards = [model_card(each) for each in gateways]
        cards += [adapter_card(each, name) for each in gateways for name in each.adapters]
        listed: dict[str, object] = {"object": "list", "data": cards}
        if ANTHROPIC_HEADER in request.headers:
            listed["data"] = [_as_anthropic(card, started_unix_s) for card in cards]
            listed |= {"first_id": cards[0]["id"], "last_id": cards[-1]["id"], "has_more": False}
        return listed

    @app.get("/v1/models/{name:path}", summary="One served model or adapter")
    async def model(name: str, request: Request) -> dict[str, object]:
        gateway = front.select(name)
        known = name in front.gateways
        card = model_card(gateway) if known else adapter_card(gateway, name)
        if ANTHROPIC_HEADER in request.headers:
            return _as_anthropic(card, started_unix_s)
        return card


def _as_anthropic(card: dict[str, object], created_unix_s: float) -> dict[str, object]:
    """A card with the fields that Anthropic's clients read, too."""
    return card | {
        "type": "model",
        "display_name": card["id"],
        "created_at": datetime.fromtimestamp(created_unix_s, UTC).isoformat(),
        "lifecycle": "active",
        "max_input_tokens": card["max_model_len"],
    }


def _add_tokens(app: FastAPI, front: Front) -> None:
    prompt = describe_body(TokenizeBody, {"prompt": "Hello"})

    @app.post("/tokenize", summary="The tokens of a prompt or conversation", openapi_extra=prompt)
    async def to_tokens(request: Request) -> Response:
        return await tokenize(front, request)

    tokens = describe_body(DetokenizeBody, {"tokens": [1, 2, 3]})

    @app.post("/detokenize", summary="The text of tokens", openapi_extra=tokens)
    async def to_text(request: Request) -> Response:
        return await detokenize(front, request)


def _add_status(app: FastAPI, front: Front) -> None:
    @app.get(
        "/health",
        summary="200 if a model accepts requests, else 503 with the reason",
        responses=NOT_READY,
    )
    async def health(
        model: Annotated[str, Query(description="Only this model; empty: all models.")] = "",
    ) -> Response:
        asked = {model: front.select(model)} if model else front.gateways
        states = {name: gateway.obstacle or OK for name, gateway in asked.items()}
        warnings = {name: list(each.warnings) for name, each in asked.items() if each.warnings}
        details = {"models": states} | ({"warnings": warnings} if warnings else {})
        if OK in states.values():
            return JSONResponse({"status": OK} | details)
        return JSONResponse({"status": next(iter(states.values()))} | details, 503)

    @app.get("/ping", summary="Same as /health", responses=NOT_READY)
    async def ping() -> Response:
        return await health()

    @app.post("/ping", summary="Same as /health", responses=NOT_READY)
    async def post_ping() -> Response:
        return await health()

    @app.get("/version", summary="The version of foretoken")
    async def version() -> dict[str, str]:
        return {"version": foretoken_version()}

    @app.get("/load", summary="Number of running and waiting choices")
    async def load() -> dict[str, int]:
        return {"server_load": front.live}


def _add_metrics(app: FastAPI, front: Front) -> Endpoint:
    names: dict[str, Any] = {
        "name": "name[]",
        "in": "query",
        "description": "Only series of these names.",
        "schema": {"type": "array", "items": {"type": "string"}, "maxItems": MAX_NAMES},
    }

    @app.get(
        METRICS_PATH,
        summary="Metrics in Prometheus' text format",
        openapi_extra={"parameters": [names]},
        response_class=PlainTextResponse,
    )
    async def metrics(request: Request) -> Response:
        named = request.query_params.getlist("name[]")
        if len(named) > MAX_NAMES:
            raise InvalidArgument("name[]", f"at most {MAX_NAMES} names, got {len(named)}")
        return Response(await front.aggregator.text(named), media_type=CONTENT_TYPE)

    return metrics


def list_endpoints(app: FastAPI) -> Mapping[str, str]:
    """The summary of each path of the API."""
    return {
        path: "; ".join(dict.fromkeys(method["summary"] for method in methods.values()))
        for path, methods in app.openapi()["paths"].items()
    }
