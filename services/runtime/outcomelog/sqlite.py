"""The outcome log in an SQLite file, shared by the processes of one host."""

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

_SPARE = 16  # up to a sixteenth more rows than the bound are stored, so that few appends trim
_MISTAKES = {  # errors that a retry does not fix
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
    """Runs every blocking call in one thread, never on the event loop."""

    def __init__(self, file: LogFile, rows_max: int):
        self._file = file
        self._rows_max = rows_max
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="outcome-log")
        self._batch = 0  # number of the append, the same when it is repeated
        self._committed = -1  # the last committed batch; only the thread uses it

    @classmethod
    def open(cls, path: Path | str, rows_max: int) -> Self:
        """The log at `path`. Creates the file and its directory if missing, and moves an unusable
        file aside.

        Blocks briefly. Raises ValueError if the path is not writable or the file belongs to
        another program. A locked file or a full disk is reported by the first use.
        """
        file = LogFile(Path(path))
        try:
            file.run(lambda _: None)
        except LogUnavailable as error:
            if _is_mistake(error.__cause__):
                raise ValueError(
                    f"{error}; name a file in a directory that this user can write"
                ) from error
        return cls(file, rows_max)

    @property
    def replaced(self) -> bool:
        return self._file.replaced

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
        """One transaction. Positions have no gaps, so the first and the last give the number of
        rows."""
        if batch == self._committed:
            return
        with connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany(_APPEND, [(r.kind, r.version, r.payload) for r in rows])
            oldest, newest = connection.execute(_ENDS).fetchone()
            if newest - oldest >= self._rows_max + self._rows_max // _SPARE:
                connection.execute(_TRIM, (newest - self._rows_max,))
        self._committed = batch

    def _read(self, after: int, limit: int, connection: sqlite3.Connection) -> list[Entry]:
        found = connection.execute(_READ, (after, self._rows_max, limit)).fetchall()
        return [Entry(f"{position:020d}", Row(*row)) for position, *row in found]


def _is_mistake(cause: BaseException | None) -> bool:
    if isinstance(cause, sqlite3.Error):
        return getattr(cause, "sqlite_errorcode", -1) & 0xFF in _SQLITE_MISTAKES
    return isinstance(cause, NotALog) or (isinstance(cause, OSError) and cause.errno in _MISTAKES)
