"""The outcome log in one SQLite file, shared by the processes of one host."""

import asyncio
import errno
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Self, TypeVar

from services.runtime.outcomelog.interface import Entry, LogUnavailable, Row
from services.runtime.outcomelog.logfile import LogFile, NotALog

T = TypeVar("T")

_SPARE = 16  # a sixteenth of the bound more lies in the file, so that one append in many trims
_MISTAKES = {  # what trying again won't mend
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST,
    errno.ENOENT, errno.ENAMETOOLONG,
}  # fmt: skip
_SQLITE_MISTAKES = {sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM}
_APPEND = "INSERT INTO outcomes (kind, version, payload) VALUES (?, ?, ?)"
_TRIM = "DELETE FROM outcomes WHERE position <= ?"
_ENDS = "SELECT coalesce(min(position), 0), coalesce(max(position), 0) FROM outcomes"
_READ = """
    SELECT position, kind, version, payload FROM outcomes
    WHERE position > max(?, (SELECT coalesce(max(position), 0) FROM outcomes) - ?)
    ORDER BY position LIMIT ?
"""


class SqliteLog:
    """Every blocking call runs in one thread of its own, never on the event loop."""

    def __init__(self, file: LogFile, rows_max: int):
        self._file = file
        self._rows_max = rows_max
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="outcome-log")
        self._batch = 0  # counts appends; a repeated one keeps its number
        self._kept = -1  # the last batch that was committed; the thread's

    @classmethod
    def open(cls, path: Path | str, rows_max: int) -> Self:
        """The log at `path`, made if missing, with its directory; what is unusable is moved aside.

        Blocks for a moment. Raises ValueError where nobody can write, or when the file is another
        program's. A file that is locked or a disk that is full is left to the first use.
        """
        file = LogFile(Path(path))
        try:
            file.run(_nothing)
        except LogUnavailable as error:
            if _is_mistake(error.__cause__):
                raise ValueError(
                    f"{error}; name a file in a directory that this user can write"
                ) from error
        return cls(file, rows_max)

    async def append(self, rows: Sequence[Row], again: bool = False) -> None:
        self._batch += not again
        await self._run(partial(self._append, self._batch, rows))

    async def read(self, after: str, limit: int) -> list[Entry]:
        return await self._run(partial(self._read, int(after or 0), limit))

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._file.close)
        self._thread.shutdown(wait=False)

    async def _run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._file.run, work)

    def _append(self, batch: int, rows: Sequence[Row], connection: sqlite3.Connection) -> None:
        """One transaction. Positions have no gaps, so their ends tell how many rows there are."""
        if batch == self._kept:
            return
        with connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany(_APPEND, [(r.kind, r.version, r.payload) for r in rows])
            oldest, newest = connection.execute(_ENDS).fetchone()
            if newest - oldest >= self._rows_max + self._rows_max // _SPARE:
                connection.execute(_TRIM, (newest - self._rows_max,))
        self._kept = batch

    def _read(self, after: int, limit: int, connection: sqlite3.Connection) -> list[Entry]:
        found = connection.execute(_READ, (after, self._rows_max, limit)).fetchall()
        return [Entry(f"{position:020d}", Row(*row)) for position, *row in found]


def _nothing(connection: sqlite3.Connection) -> None:
    """Running it opens the file."""


def _is_mistake(cause: BaseException | None) -> bool:
    if isinstance(cause, sqlite3.Error):
        return getattr(cause, "sqlite_errorcode", -1) & 0xFF in _SQLITE_MISTAKES
    return isinstance(cause, NotALog) or (isinstance(cause, OSError) and cause.errno in _MISTAKES)
