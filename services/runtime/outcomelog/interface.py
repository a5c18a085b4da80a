"""What an outcome log promises, whatever keeps it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class LogUnavailable(Exception):
    """The log cannot be written or read now; a sentence that names it and the cause."""


@dataclass(frozen=True, slots=True)
class Row:
    """One outcome as its service wrote it. The log never looks into the payload.

    `version` is that of the payload's layout, counted for each kind: a reader knows which layouts
    it understands.
    """

    kind: str
    version: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class Entry:
    """A row and where it lies. Positions are opaque; as strings they order by append."""

    position: str
    row: Row


class OutcomeLog(Protocol):
    """Append-only, and bounded by a number of rows, all kinds together: the oldest go.

    A kind that comes often pushes the others out; it deserves a log of its own.
    """

    async def append(self, rows: Sequence[Row], again: bool = False) -> None:
        """Keep the rows, next to each other and in this order, or none of them.

        After LogUnavailable or a cancellation nobody knows which. `again` repeats exactly the rows
        of the append before: they are then kept once, whatever became of the first try. One caller
        appends at a time. Raises LogUnavailable.
        """

    async def read(self, after: str, limit: int) -> list[Entry]:
        """At most `limit` entries behind the position `after`, oldest first; fewer: that is all.

        `""` reads from the oldest kept. A position stays good when its row is gone, and when the
        log was lost and made anew. Raises LogUnavailable.
        """

    async def close(self) -> None:
        """Let go of file or connection. Never raises LogUnavailable; nothing may follow."""
