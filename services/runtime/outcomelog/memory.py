"""The in-memory outcome log."""

from collections.abc import Sequence

from services.runtime.outcomelog.interface import Entry, Row


class MemoryLog:
    """Keeps the newest rows in memory."""

    replaced = False

    def __init__(self, rows_max: int):
        self._rows: dict[int, Row] = {}  # by position, without gaps
        self._oldest, self._next = 1, 1
        self._rows_max = rows_max

    async def append(self, rows: Sequence[Row], again: bool = False) -> None:
        if again:  # an append in memory always succeeds
            return
        for row in rows:
            self._rows[self._next] = row
            self._next += 1
        while len(self._rows) > self._rows_max:
            del self._rows[self._oldest]
            self._oldest += 1

    async def read(self, after: str, limit: int) -> list[Entry]:
        first = max(int(after or 0) + 1, self._oldest)
        return [
            Entry(f"{position:020d}", self._rows[position])
            for position in range(first, min(first + limit, self._next))
        ]

    async def close(self) -> None:
        """Does nothing."""
