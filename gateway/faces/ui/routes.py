"""The live page over HTTP: its files under `/ui/` and its three JSON endpoints."""

import asyncio
from collections.abc import Mapping

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse, RedirectResponse

from gateway.faces.http.errors import error_body, error_response
from gateway.faces.ui.board import Board, describe_server, shipped_presets
from gateway.faces.ui.files import INDEX, PageFile, page_files
from gateway.gateway import Gateway
from protos.generated import scheduler_pb2
from services.runtime.errors import Code, InvalidArgument, ServiceError

MAX_ID_CHARS = 128
# The page needs no API key: it asks the user for the key that its data needs.
PAGE_PATHS = frozenset(("/ui", "/ui/", *(f"/ui/{name}" for name in page_files())))
NOT_FOUND = 404
# With `no-cache` a browser revalidates each time; an unchanged etag costs a 304.
FILE_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": (
        "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; "
        "object-src 'none'"
    ),
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
DATA_HEADERS = {"cache-control": "no-store", "x-content-type-options": "nosniff"}


def add_page(app: FastAPI, gateway: Gateway) -> None:
    """Adds the page and its data to the app."""
    board = Board(gateway)

    @app.get("/ui/board", include_in_schema=False)
    async def show_board() -> Response:
        return Response(await board.body(), headers=DATA_HEADERS, media_type="application/json")

    @app.get("/ui/about", include_in_schema=False)
    async def show_about() -> Response:
        presets = await asyncio.to_thread(shipped_presets)  # reads a file once
        return JSONResponse(describe_server(gateway, presets), headers=DATA_HEADERS)

    @app.get("/ui/why/{request_id}", include_in_schema=False)
    async def why(request_id: str) -> Response:
        return await _send_stories(gateway, request_id)

    add_files(app)  # last: its route matches any name


def add_files(app: FastAPI) -> None:
    """Adds the static files, which need no gateway."""
    files = page_files()

    @app.get("/ui", include_in_schema=False)
    async def folder() -> Response:
        return RedirectResponse("ui/")

    @app.get("/ui/", include_in_schema=False)
    async def index(request: Request) -> Response:
        return send_file(files, INDEX, request)

    @app.get("/ui/{name}", include_in_schema=False)
    async def file(name: str, request: Request) -> Response:
        return send_file(files, name, request)


def send_file(files: Mapping[str, PageFile], name: str, request: Request) -> Response:
    """One file, or a 304 if the browser has it. Raises HTTPException for an unknown name."""
    found = files.get(name)
    if found is None:
        raise HTTPException(NOT_FOUND)
    headers = FILE_HEADERS | {"etag": found.etag}
    if found.is_known(request.headers.get("if-none-match", "")):
        return Response(status_code=304, headers=headers)
    return Response(found.content, headers=headers, media_type=found.media_type)


async def _send_stories(gateway: Gateway, request_id: str) -> Response:
    """The stories of a request, as `foretoken why` shows them."""
    try:
        if len(request_id) > MAX_ID_CHARS:
            raise InvalidArgument("request_id", f"is longer than {MAX_ID_CHARS} characters")
        response = await gateway.why(request_id)
    except ServiceError as error:
        return _error_response(error)
    return JSONResponse(
        {"stories": [_encode_story(story) for story in response.stories]}, headers=DATA_HEADERS
    )


def _error_response(error: ServiceError) -> Response:
    """An unknown request id is a 404 about the request, not about a model."""
    if error.code is not Code.NOT_FOUND:
        return error_response(error)
    body = error_body(error)
    body["error"] |= {"param": "request_id", "code": "request_not_found"}
    return JSONResponse(body, NOT_FOUND)


def _encode_story(story: scheduler_pb2.Story) -> Mapping[str, object]:
    return {
        "request_id": story.request_id,
        "live": story.live,
        "chapters": [
            {
                "at_s": chapter.at_s,
                "kind": chapter.kind,
                "text": chapter.text,
                "times": chapter.times,
                "until_s": chapter.until_s,
            }
            for chapter in story.chapters
        ],
    }
