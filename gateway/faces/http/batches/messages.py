"""`/v1/messages/batches`: Anthropic's batches, run as those of `/v1/batches`."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from secrets import token_hex

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field

from gateway.admission.caller import current_caller
from gateway.config import GatewayConfig
from gateway.faces.http.batches.owned import find_own_batch, list_own_batches
from gateway.faces.http.batches.progress import InputLimits, read_lines
from gateway.faces.http.batches.records import WINDOW_S, BatchRecord, Counts, Status
from gateway.faces.http.batches.room import make_room
from gateway.faces.http.batches.store import ID_BYTES, BatchStore, in_storage
from gateway.faces.http.body import parse_json, read_and_decode
from gateway.faces.http.describe import describe_body, describe_content
from gateway.faces.http.dialect.pages import Paging
from gateway.faces.http.errors import MESSAGES_PATH, NoSuchObject, error_body, internal_error
from gateway.faces.http.offline.lines import OK
from gateway.faces.http.schema import validate_model
from gateway.front import Front
from services.runtime.errors import InvalidArgument

Entry = dict[str, object]

BATCHES = f"{MESSAGES_PATH}/batches"
PREFIX = "msg"  # of the id of a batch in the folder
PAGES = Paging(20, 1000)  # as at Anthropic
EXAMPLE = {
    "requests": [
        {
            "custom_id": "a",
            "params": {"max_tokens": 64, "messages": [{"role": "user", "content": "Hello"}]},
        }
    ]
}
CURSORS = [
    {"name": name, "in": "query", "schema": {"type": "string"}}
    for name in ("after_id", "before_id")
]
# The result of a line that was not sent, by the code of its error.
UNSENT = {"batch_expired": "expired", "batch_cancelled": "canceled"}


class MessageRequest(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    custom_id: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    params: dict[str, object]


class MessageBatchBody(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    requests: list[dict[str, object]] = Field(min_length=1)  # MessageRequests

    def encode_lines(self, config: GatewayConfig) -> list[bytes]:
        """The lines that the runner of batches reads. Raises InvalidArgument naming the request."""
        if len(self.requests) > config.batch_lines:
            raise InvalidArgument("requests", f"at most {config.batch_lines}; make several batches")
        seen: set[str] = set()
        lines = []
        for number, fields in enumerate(self.requests):
            request = _read_request(number, fields)
            if request.custom_id in seen:
                raise InvalidArgument(
                    f"requests.{number}.custom_id", f"{request.custom_id!r} occurs twice"
                )
            seen.add(request.custom_id)
            line = _encode(
                {"custom_id": request.custom_id, "url": MESSAGES_PATH, "body": request.params}
            )
            if len(line) > config.max_body_bytes:
                raise InvalidArgument(
                    f"requests.{number}", f"exceeds {config.max_body_bytes} bytes"
                )
            lines.append(line)
        return lines


def _read_request(number: int, fields: Entry) -> MessageRequest:
    try:
        return validate_model(MessageRequest, fields)
    except InvalidArgument as fault:
        raise InvalidArgument(f"requests.{number}", fault.message) from None


def add_message_batches(app: FastAPI, front: Front, store: BatchStore) -> None:
    config = front.config
    _add_ended(app, store, InputLimits(config.batch_lines, config.max_body_bytes))
    described = describe_body(MessageBatchBody, EXAMPLE)

    @app.post(BATCHES, summary="Run Anthropic requests as a batch", openapi_extra=described)
    async def create(request: Request) -> Response:
        def decode(raw: bytes) -> list[bytes]:
            return validate_model(MessageBatchBody, parse_json(raw)).encode_lines(config)

        lines = await read_and_decode(front, request, decode)
        return JSONResponse(await in_storage(_create, store, config, lines))

    listing = {"parameters": [PAGES.parameters["parameters"][0], *CURSORS]}

    @app.get(BATCHES, summary="Batches of Anthropic requests", openapi_extra=listing)
    async def listed(request: Request) -> Entry:
        def read() -> list[Entry]:
            return [_render(store, each) for each in list_own_batches(store, of_messages=True)]

        return _select_page(await in_storage(read), request.query_params)

    @app.get(f"{BATCHES}/{{batch_id}}", summary="One batch of Anthropic requests")
    async def one(batch_id: str) -> Entry:
        return await in_storage(lambda: _render(store, _own_batch(store, batch_id)))

    @app.post(f"{BATCHES}/{{batch_id}}/cancel", summary="Cancel a batch of Anthropic requests")
    async def cancel(batch_id: str) -> Entry:
        def mark() -> Entry:
            batch = _own_batch(store, batch_id)
            if batch.ended:
                raise InvalidArgument("", "the batch has ended")
            store.cancel(batch.id)
            return _render(store, batch)

        return await in_storage(mark)


def _add_ended(app: FastAPI, store: BatchStore, limits: InputLimits) -> None:
    """The endpoints of ended batches."""

    @app.delete(f"{BATCHES}/{{batch_id}}", summary="Delete an ended batch of Anthropic requests")
    async def delete(batch_id: str) -> Entry:
        def remove() -> Entry:
            store.remove_batch(_own_ended(store, batch_id).id)
            return {"id": batch_id, "type": "message_batch_deleted"}

        return await in_storage(remove)

    @app.get(
        f"{BATCHES}/{{batch_id}}/results",
        summary="The results of an ended batch, as JSONL",
        responses=describe_content("application/x-jsonl"),
    )
    async def results(batch_id: str) -> Response:
        batch = await in_storage(_own_ended, store, batch_id)
        return StreamingResponse(
            _read_results(store, batch, limits), media_type="application/x-jsonl"
        )


def _create(store: BatchStore, config: GatewayConfig, lines: Sequence[bytes]) -> Entry:
    """Stores a batch, which the process that runs batches finds. Raises ServiceError."""
    make_room(store, config)
    now_s = int(time.time())
    batch = BatchRecord(
        f"batch_{token_hex(ID_BYTES)}",
        current_caller().key,
        MESSAGES_PATH,
        "",
        now_s,
        now_s + WINDOW_S,
        counts=Counts(len(lines)),
    ).to(Status.IN_PROGRESS, now_s)
    store.add_batch_of_messages(batch, lines)
    return _render(store, batch)


def _own_batch(store: BatchStore, batch_id: str) -> BatchRecord:
    """A batch of the caller's key. Raises NoSuchObject."""
    batch = find_own_batch(store, batch_id.removeprefix(PREFIX), of_messages=True)
    if batch is None or not batch_id.startswith(PREFIX):
        raise NoSuchObject("batch", batch_id)
    return batch


def _own_ended(store: BatchStore, batch_id: str) -> BatchRecord:
    """The same. Raises InvalidArgument for a batch that has not ended."""
    batch = _own_batch(store, batch_id)
    if not batch.ended:
        raise InvalidArgument("", "the batch has not ended; wait until it has, or cancel it")
    return batch


def _render(store: BatchStore, batch: BatchRecord) -> Entry:
    cancelled_at = store.cancelled_at(batch.id)
    status = "in_progress" if cancelled_at is None else "canceling"
    batch_id = f"{PREFIX}{batch.id}"
    return {
        "id": batch_id,
        "type": "message_batch",
        "processing_status": "ended" if batch.ended else status,
        "request_counts": _count_results(batch),
        "created_at": _render_time(batch.created_at),
        "expires_at": _render_time(batch.expires_at),
        "ended_at": _render_time(batch.times[f"{batch.status}_at"]) if batch.ended else None,
        "cancel_initiated_at": None if cancelled_at is None else _render_time(cancelled_at),
        "archived_at": None,
        # Relative: a proxy may have changed the scheme and the host that the client uses.
        "results_url": f"{BATCHES}/{batch_id}/results" if batch.ended else None,
    }


def _count_results(batch: BatchRecord) -> Mapping[str, int]:
    """All are `processing` until the batch has ended, as at Anthropic."""
    found = dict.fromkeys(("processing", "succeeded", "errored", "canceled", "expired"), 0)
    counts = batch.counts
    if not batch.ended:
        return found | {"processing": counts.total}
    found |= {"canceled" if batch.status is Status.CANCELLED else "expired": batch.unanswered}
    errored = counts.total - counts.completed - batch.unanswered
    return found | {"succeeded": counts.completed, "errored": errored}


def _read_results(store: BatchStore, batch: BatchRecord, limits: InputLimits) -> Iterator[bytes]:
    """A line for each request. Those that a failed batch has not answered are last."""
    answered: set[str] = set()
    folder = store.batch_path(batch.id)
    for path in (folder / "output", folder / "errors"):
        with path.open("rb") as lines:
            for text in lines:
                line = json.loads(text)
                answered.add(line["custom_id"])
                yield _encode({"custom_id": line["custom_id"], "result": _read_result(line)})
    given = store.input_path(batch)
    if len(answered) < batch.counts.total and given.exists():
        failed: Entry = {"type": "errored", "error": error_body(internal_error(), MESSAGES_PATH)}
        for request in read_lines(given, limits):
            if request.custom_id not in answered:
                yield _encode({"custom_id": request.custom_id, "result": failed})


def _read_result(line: Mapping[str, Mapping[str, object]]) -> Entry:
    response = line["response"]
    if response is None:
        return {"type": UNSENT[str(line["error"]["code"])]}
    if response["status_code"] == OK:
        return {"type": "succeeded", "message": response["body"]}
    return {"type": "errored", "error": response["body"]}


def _select_page(entries: Sequence[Entry], query: Mapping[str, str]) -> Entry:
    """The page that a query asks for, newest first. Raises InvalidArgument and NoSuchObject."""
    after, before = query.get("after_id", ""), query.get("before_id", "")
    if after and before:
        raise InvalidArgument("before_id", "cannot be given with after_id")
    order = "asc" if before else "desc"
    asked = {"limit": query.get("limit", ""), "after": after or before, "order": order}
    page = PAGES.select(entries, asked)
    del page["object"]
    if before:
        data = page["data"]
        assert isinstance(data, list)
        page |= {"data": data[::-1], "first_id": page["last_id"], "last_id": page["first_id"]}
    return page


def _render_time(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat()


def _encode(fields: Entry) -> bytes:
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
