"""The JSON endpoints of the live page."""

import asyncio

from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse
from google.protobuf.json_format import MessageToDict

from gateway.faces.http.errors import error_response, openai_error_body
from gateway.faces.ui.board import Board, describe_server, shipped_presets
from gateway.front import Front
from protos.generated import scheduler_pb2
from services.runtime.errors import Code, InvalidArgument, ServiceError

MAX_ID_CHARS = 128
NOT_FOUND = 404
DATA_HEADERS = {"cache-control": "no-store", "x-content-type-options": "nosniff"}


def add_data(app: FastAPI, front: Front) -> None:
    """Adds the page's data to the app. An empty `model` is the first one."""
    boards = {name: Board(gateway) for name, gateway in front.gateways.items()}

    @app.get("/ui/board", include_in_schema=False)
    async def show_board(model: str = "") -> Response:
        board = boards[front.select(model).config.model_name]
        return Response(await board.body(), headers=DATA_HEADERS, media_type="application/json")

    @app.get("/ui/about", include_in_schema=False)
    async def show_about(model: str = "") -> Response:
        presets = await asyncio.to_thread(shipped_presets)  # reads a file once
        about = describe_server(front.select(model), list(front.gateways), presets)
        return JSONResponse(about, headers=DATA_HEADERS)

    @app.get("/ui/why/{request_id}", include_in_schema=False)
    async def why(request_id: str) -> Response:
        return await _send_stories(front, request_id)


async def _send_stories(front: Front, request_id: str) -> Response:
    """The stories of a request, as `foretoken why` shows them."""
    try:
        if len(request_id) > MAX_ID_CHARS:
            raise InvalidArgument("request_id", f"is longer than {MAX_ID_CHARS} characters")
        response = await front.why(request_id)
    except ServiceError as error:
        return _error_response(error)
    return JSONResponse({"stories": _encode_stories(response)}, headers=DATA_HEADERS)


def _encode_stories(response: scheduler_pb2.WhyResponse) -> list[object]:
    """Each story with all its fields, including those with a default value."""
    content = MessageToDict(
        response, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return list(content["stories"])


def _error_response(error: ServiceError) -> Response:
    """An unknown request id is a 404 about the request, not about a model."""
    if error.code is not Code.NOT_FOUND:
        return error_response(error)
    body = openai_error_body(error)
    body["error"] |= {"param": "request_id", "code": "request_not_found"}
    return JSONResponse(body, NOT_FOUND)
