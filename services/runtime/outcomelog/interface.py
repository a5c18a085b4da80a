"""The interface of an outcome log, whatever stores it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class LogUnavailable(Exception):
    """The log cannot be written or read at the moment; a sentence that names it and the cause."""


@dataclass(frozen=True, slots=True)
class Row:
    """One outcome as its service wrote it. The log does not interpret the payload.

    `version` is the layout of the payload, numbered per kind: a reader knows which layouts it
    understands.
    """

    kind: str
    version: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class Entry:
    """A row and its position. Positions are opaque; as strings they order by append."""

    position: str
    row: Row


class OutcomeLog(Protocol):
    """Append-only, and bounded in rows, all kinds together: the oldest are dropped.

    A frequent kind displaces the others and deserves a log of its own.
    """

    async def append(self, rows: Sequence[Row], again: bool = False) -> None:
        """Appends the rows, adjacent and in this order, or none of them.

        After LogUnavailable or a cancellation the outcome is unknown. `again` repeats the rows of
        the previous append: they are stored once, whatever happened to the first attempt. Only one
        caller appends at a time. Raises LogUnavailable.
        """

    async def read(self, after: str, limit: int) -> list[Entry]:
        """At most `limit` entries after the position `after`, oldest first; fewer mean the end of
        the log.

        `""` reads from the oldest entry. A position stays valid when its row is dropped, and
        when the log was lost and recreated. Raises LogUnavailable.
        """

    async def close(self) -> None:
        """Releases file or connection. Never raises LogUnavailable; no call may follow."""
