"""The interface of outcome logs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class LogUnavailable(Exception):
    """The log cannot be written or read at the moment. The message names the log and the cause."""


@dataclass(frozen=True, slots=True)
class Row:
    """One outcome. `version` is the layout of the payload, per kind, which the log does not
    interpret."""

    kind: str
    version: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class Entry:
    """A row and its position: an opaque string that sorts in the order of appends."""

    position: str
    row: Row


class OutcomeLog(Protocol):
    """An append-only log that drops its oldest rows above a bound.

    The bound applies to all kinds together: use a separate log for a frequent kind.
    """

    async def append(self, rows: Sequence[Row], again: bool = False) -> None:
        """Appends all rows, adjacent and in this order, or none of them.

        After LogUnavailable or a cancellation, the result is unknown. `again` repeats the previous
        append; its rows are stored once, even if the first attempt succeeded. Only one caller
        appends at a time. Raises LogUnavailable.
        """

    async def read(self, after: str, limit: int) -> list[Entry]:
        """At most `limit` entries after the position `after`, oldest first; fewer at the end of the
        log.

        `""` reads from the oldest entry. A position stays valid after its row is dropped, and after
        the log is lost and recreated. Raises LogUnavailable.
        """

    @property
    def replaced(self) -> bool:
        """Whether an unusable file was moved aside since the log was opened."""

    async def close(self) -> None:
        """Closes the file or connection. Never raises LogUnavailable; no call may follow."""
