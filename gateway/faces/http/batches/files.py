"""`/v1/files`: input and output files of batches."""

from pathlib import Path

from fastapi import FastAPI, Request, Response
from fastapi.responses import FileResponse, JSONResponse

from gateway.admission.caller import current_caller
from gateway.config import GatewayConfig
from gateway.faces.http.batches.records import FileRecord, Purpose
from gateway.faces.http.batches.store import BatchStore, in_storage
from gateway.faces.http.batches.upload import Uploads
from gateway.faces.http.describe import describe_content
from gateway.faces.http.dialect.pages import Paging
from gateway.faces.http.errors import BodyTooLarge, NoSuchObject
from services.runtime.errors import InvalidArgument

FILES = "/v1/files"
PAGES = Paging(10_000, 10_000)  # as at OpenAI
FORM = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"type": "string", "enum": [Purpose.INPUT]},
    },
}
LINES = describe_content("application/jsonl")
UPLOAD_BODY = {"requestBody": {"content": {"multipart/form-data": {"schema": FORM}}}}


def own_file(store: BatchStore, file_id: str) -> FileRecord:
    """A file of the caller's key. Raises NoSuchObject."""
    record = store.find_file(file_id)
    if record is None or record.owner != current_caller().key:
        raise NoSuchObject("File object", file_id)
    return record


def _own_content(store: BatchStore, file_id: str) -> tuple[FileRecord, Path]:
    """A file of the caller's key and its content. Raises NoSuchObject."""
    record = own_file(store, file_id)
    path = store.content_path(record.id)
    if not path.exists():
        raise NoSuchObject("File object", file_id)
    return record, path


def add_files(app: FastAPI, config: GatewayConfig, store: BatchStore) -> None:
    uploads = Uploads(config)

    @app.post(FILES, summary="Upload the lines of a batch", openapi_extra=UPLOAD_BODY)
    async def upload(request: Request) -> Response:
        async with uploads.receive(request) as form:
            if form.purpose != Purpose.INPUT:
                raise InvalidArgument("purpose", f"must be {Purpose.INPUT}, not {form.purpose!r}")
            if not form.size:
                raise InvalidArgument("file", "is empty")
            if form.size > config.batch_file_bytes:
                raise BodyTooLarge(config.batch_file_bytes)
            if await in_storage(store.count_files) >= config.batch_files:
                raise InvalidArgument(
                    "file", f"{config.batch_files} files are stored; delete one before"
                )
            owner = current_caller().key
            record = await in_storage(store.add_file, form.content, form.size, form.filename, owner)
        return JSONResponse(record.public())

    @app.get(FILES, summary="Files of batches", openapi_extra=PAGES.parameters)
    async def listed(request: Request) -> dict[str, object]:
        owner, purpose = current_caller().key, request.query_params.get("purpose", "")
        shown = [
            each.public()
            for each in await in_storage(store.list_files)
            if each.owner == owner and purpose in ("", each.purpose)
        ]
        return PAGES.select(shown, request.query_params)

    @app.get(f"{FILES}/{{file_id}}", summary="One file")
    async def one(file_id: str) -> dict[str, object]:
        return (await in_storage(own_file, store, file_id)).public()

    @app.get(f"{FILES}/{{file_id}}/content", summary="The content of a file", responses=LINES)
    async def content(file_id: str) -> Response:
        record, path = await in_storage(_own_content, store, file_id)
        return FileResponse(path, media_type="application/jsonl", filename=record.filename)

    @app.delete(f"{FILES}/{{file_id}}", summary="Delete a file")
    async def delete(file_id: str) -> dict[str, object]:
        record = await in_storage(own_file, store, file_id)
        await in_storage(store.remove_file, record.id)
        return {"id": record.id, "object": "file", "deleted": True}
