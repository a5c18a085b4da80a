"""`/v1/batches`: files of requests that run behind all others."""

import time
from secrets import token_hex
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict

from gateway.config import GatewayConfig
from gateway.faces.http.batches.files import add_files, own_file
from gateway.faces.http.batches.messages import add_message_batches
from gateway.faces.http.batches.owned import find_own_batch, list_own_batches
from gateway.faces.http.batches.records import WINDOW_S, BatchRecord, Purpose
from gateway.faces.http.batches.room import make_room
from gateway.faces.http.batches.store import ID_BYTES, BatchStore, in_storage
from gateway.faces.http.batches.upload import NO_EXPIRY
from gateway.faces.http.body import parse_json, read_and_decode
from gateway.faces.http.describe import describe_body
from gateway.faces.http.dialect.metadata import check_metadata
from gateway.faces.http.dialect.pages import Paging
from gateway.faces.http.errors import NoSuchObject
from gateway.faces.http.offline.requests import ENDPOINTS
from gateway.faces.http.schema import validate_model
from gateway.front import Front
from services.runtime.errors import InvalidArgument

BATCHES = "/v1/batches"
EXAMPLE = {
    "input_file_id": "file-0123456789abcdef01234567",
    "endpoint": "/v1/chat/completions",
    "completion_window": "24h",
}
WINDOW = "24h"
PAGES = Paging(20, 100)  # as at OpenAI
FILES_OF_A_BATCH = 2  # that it may write


class BatchBody(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    input_file_id: str = ""
    endpoint: str = ""
    completion_window: str = WINDOW
    metadata: dict[str, str] | None = None
    output_expires_after: object = None

    def check(self) -> None:
        """Raises InvalidArgument naming the field."""
        if self.endpoint not in ENDPOINTS:
            raise InvalidArgument("endpoint", f"must be one of {', '.join(ENDPOINTS)}")
        if self.completion_window != WINDOW:
            raise InvalidArgument("completion_window", f"must be {WINDOW}")
        if self.output_expires_after is not None:
            raise InvalidArgument("output_expires_after", NO_EXPIRY)
        check_metadata(self.metadata or {})


def add_batches(app: FastAPI, front: Front) -> None:
    """Adds the endpoints of files and batches if there is a folder for them. Raises ConfigError if
    it cannot be written."""
    config = front.config
    if not config.batch_folder:
        return
    store = BatchStore(config.batch_folder)
    add_files(app, config, store)
    add_message_batches(app, front, store)
    described = describe_body(BatchBody, EXAMPLE)

    @app.post(BATCHES, summary="Run the requests of a file", openapi_extra=described)
    async def create(request: Request) -> Response:
        def decode(raw: bytes) -> BatchBody:
            body = validate_model(BatchBody, parse_json(raw))
            body.check()
            return body

        body = await read_and_decode(front, request, decode)
        batch = await in_storage(_create, store, config, body)
        return JSONResponse(batch.public())

    @app.get(BATCHES, summary="Batches", openapi_extra=PAGES.parameters)
    async def listed(request: Request) -> dict[str, object]:
        def read() -> list[dict[str, Any]]:
            return [_public(store, each) for each in list_own_batches(store, of_messages=False)]

        return PAGES.select(await in_storage(read), request.query_params)

    @app.get(f"{BATCHES}/{{batch_id}}", summary="One batch")
    async def one(batch_id: str) -> dict[str, Any]:
        return await in_storage(lambda: _public(store, _own_batch(store, batch_id)))

    @app.post(f"{BATCHES}/{{batch_id}}/cancel", summary="Cancel a batch")
    async def cancel(batch_id: str) -> dict[str, Any]:
        def mark() -> dict[str, Any]:
            batch = _own_batch(store, batch_id)
            if batch.ended:
                raise InvalidArgument("id", f"the batch has ended: it is {batch.status}")
            store.cancel(batch.id)
            return _public(store, batch)

        return await in_storage(mark)


def _create(store: BatchStore, config: GatewayConfig, body: BatchBody) -> BatchRecord:
    """Stores a batch, which the process that runs batches finds. Raises ServiceError."""
    try:
        file = own_file(store, body.input_file_id)
    except NoSuchObject as error:
        raise InvalidArgument("input_file_id", error.message) from None
    if file.purpose is not Purpose.INPUT:
        raise InvalidArgument("input_file_id", f"is of the purpose {file.purpose}")
    make_room(store, config, FILES_OF_A_BATCH)
    now_s = int(time.time())
    batch = BatchRecord(
        f"batch_{token_hex(ID_BYTES)}",
        file.owner,
        body.endpoint,
        file.id,
        now_s,
        now_s + WINDOW_S,
        metadata=body.metadata,
    )
    store.save(batch)
    return batch


def _own_batch(store: BatchStore, batch_id: str) -> BatchRecord:
    """A batch of the caller's key. Raises NoSuchObject."""
    batch = find_own_batch(store, batch_id, of_messages=False)
    if batch is None:
        raise NoSuchObject("batch", batch_id)
    return batch


def _public(store: BatchStore, batch: BatchRecord) -> dict[str, Any]:
    return batch.public(store.is_cancelled(batch.id))
