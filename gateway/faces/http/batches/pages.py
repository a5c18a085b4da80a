"""Lists of records in OpenAI's format. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from gateway.faces.http.errors import NoSuchObject
from services.runtime.errors import InvalidArgument

MAX_LIMIT = 10_000
PAGE: dict[str, Any] = {
    "parameters": [
        {"name": "limit", "in": "query", "schema": {"type": "integer", "maximum": MAX_LIMIT}},
        {"name": "after", "in": "query", "schema": {"type": "string"}},
    ]
}


class Record(Protocol):
    @property
    def id(self) -> str: ...


def make_page(
    records: Sequence[Record], shown: Sequence[dict[str, Any]], given: Mapping[str, str], limit: int
) -> dict[str, object]:
    """`limit` of the records, or as many as the query asks for, that follow the one that it names.
    `shown` are the records as the client sees them. Raises InvalidArgument and NoSuchObject."""
    text, after = given.get("limit", ""), given.get("after", "")
    if text:
        if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= MAX_LIMIT):
            raise InvalidArgument("limit", f"must be a number from 1 to {MAX_LIMIT}")
        limit = int(text)
    begin = 0
    if after:
        ids = [record.id for record in records]
        if after not in ids:
            raise NoSuchObject("object in this list", after)
        begin = ids.index(after) + 1
    data = shown[begin : begin + limit]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": begin + limit < len(records),
    }
