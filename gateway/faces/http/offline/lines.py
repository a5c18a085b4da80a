"""The lines of batch files, OpenAI's format. Pure.

{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {…}}
{"id": "…", "custom_id": "a", "response": {"status_code": 200, "request_id": "…", "body": {…}},
 "error": null}
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gateway.faces.http.body import parse_json
from gateway.faces.http.errors import error_body, http_status
from gateway.faces.http.offline.requests import CHAT_URL, COMPLETION_URL, ENDPOINTS
from gateway.faces.http.schema import Json
from services.runtime.errors import InvalidArgument, ServiceError

MAX_ID_CHARS = 256
OK = 200


@dataclass(frozen=True)
class Line:
    """A request of a file."""

    custom_id: str
    url: str
    body: Json


def read_line(text: bytes, default_id: str = "") -> Line:
    """Reads a line; with `default_id` also one that is only a body, with `prompt` or `messages`,
    or that has no custom_id. Raises InvalidArgument."""
    fields = dict(parse_json(text))
    custom_id = fields.get("custom_id", default_id)
    if not (isinstance(custom_id, str) and 0 < len(custom_id) <= MAX_ID_CHARS):
        raise InvalidArgument("custom_id", f"must be a text of 1 to {MAX_ID_CHARS} characters")
    if default_id and "body" not in fields:
        fields.pop("custom_id", None)
        if ("prompt" in fields) == ("messages" in fields):
            raise InvalidArgument("", "a line has one of prompt, messages and body")
        return Line(custom_id, CHAT_URL if "messages" in fields else COMPLETION_URL, fields)
    if fields.get("method", "POST") != "POST":
        raise InvalidArgument("method", "must be POST")
    url, body = fields.get("url"), fields.get("body")
    if not isinstance(url, str) or url not in ENDPOINTS:
        raise InvalidArgument("url", f"must be one of {', '.join(ENDPOINTS)}")
    if not isinstance(body, dict):
        raise InvalidArgument("body", "must be a JSON object")
    return Line(custom_id, url, body)


def encode_answer(line_id: str, custom_id: str, request_id: str, body: Mapping[str, Any]) -> bytes:
    return _encode(line_id, custom_id, OK, request_id, body)


def encode_fault(
    line_id: str, custom_id: str, request_id: str, error: ServiceError, url: str
) -> bytes:
    """A line that was refused, with the body and status of the HTTP answer."""
    status = http_status(error).status
    return _encode(line_id, custom_id, status, request_id, error_body(error, url))


def encode_unanswered(line_id: str, custom_id: str, code: str, message: str) -> bytes:
    """A line that was not sent, because the batch expired or was cancelled."""
    error = {"code": code, "message": message}
    return _dump({"id": line_id, "custom_id": custom_id, "response": None, "error": error})


def read_custom_id(text: bytes) -> str:
    """The id of an output line. Raises ValueError for a torn or foreign line."""
    fields = json.loads(text)
    custom_id = fields.get("custom_id") if isinstance(fields, dict) else None
    if not isinstance(custom_id, str):
        raise ValueError("the line has no custom_id")
    return custom_id


def _encode(
    line_id: str, custom_id: str, status: int, request_id: str, body: Mapping[str, Any]
) -> bytes:
    response = {"status_code": status, "request_id": request_id, "body": body}
    return _dump({"id": line_id, "custom_id": custom_id, "response": response, "error": None})


def _dump(fields: Mapping[str, Any]) -> bytes:
    return json.dumps(fields, ensure_ascii=False).encode() + b"\n"
