"""Lists in OpenAI's format, a page at a time. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.faces.http.errors import NoSuchObject
from services.runtime.errors import InvalidArgument

ORDERS = {"desc": False, "asc": True}  # whether the list is reversed
MAX_LIMIT_DIGITS = 9


@dataclass(frozen=True, slots=True)
class Paging:
    """The entries of a page, without a limit in the query and at most."""

    default: int
    most: int

    @property
    def parameters(self) -> dict[str, Any]:
        """What the OpenAPI document says of the query."""
        schemas: dict[str, dict[str, Any]] = {
            "limit": {"type": "integer", "maximum": self.most, "default": self.default},
            "after": {"type": "string"},
            "order": {"type": "string", "enum": [*ORDERS]},
        }
        listed = [{"name": name, "in": "query", "schema": each} for name, each in schemas.items()]
        return {"parameters": listed}

    def select(
        self, entries: Sequence[Mapping[str, Any]], query: Mapping[str, str]
    ) -> dict[str, object]:
        """The page that a query asks for, of entries with an `id`, the last one first. Raises
        InvalidArgument and NoSuchObject."""
        limit, order = self._read_limit(query.get("limit", "")), query.get("order") or "desc"
        if order not in ORDERS:
            raise InvalidArgument("order", f"must be {' or '.join(ORDERS)}, not {order[:80]!r}")
        ordered = [*reversed(entries)] if ORDERS[order] else entries
        begin = 0
        if after := query.get("after", ""):
            ids = [entry["id"] for entry in ordered]
            if after not in ids:
                raise NoSuchObject("object in this list", after)
            begin = ids.index(after) + 1
        data = ordered[begin : begin + limit]
        return {
            "object": "list",
            "data": data,
            "first_id": data[0]["id"] if data else None,
            "last_id": data[-1]["id"] if data else None,
            "has_more": begin + limit < len(ordered),
        }

    def _read_limit(self, text: str) -> int:
        if not text:
            return self.default
        number = text[:MAX_LIMIT_DIGITS]
        if not (text.isascii() and text.isdigit() and 1 <= int(number) <= self.most):
            raise InvalidArgument("limit", f"must be a number from 1 to {self.most}")
        return int(number)
