"""Reads an outcome log as a whole and changes nothing, also while servers write it."""

import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from pathlib import Path

from services.runtime.outcomelog.interface import LogUnavailable, Row
from services.runtime.outcomelog.logfile import BUSY_S
from services.runtime.outcomelog.opening import open_log

PAGE_ROWS = 256  # read at once: a transaction of milliseconds, which holds up no writer
_READ = """
    SELECT position, kind, version, payload FROM outcomes
    WHERE position > ? ORDER BY position LIMIT ?
"""


async def read_rows(where: str) -> AsyncIterator[Row]:
    """The rows of the log at a file or URL, oldest first.

    Makes, repairs and moves no file. Raises LogUnavailable, and ValueError for an invalid URL.
    """
    if "://" not in where:
        for row in _read_file(Path(where)):
            yield row
        return
    log, position = open_log(where, PAGE_ROWS), ""
    try:
        while entries := await log.read(position, PAGE_ROWS):
            for entry in entries:
                yield entry.row
            position = entries[-1].position
    finally:
        await log.close()


def _read_file(path: Path) -> Iterator[Row]:
    address = f"{path.absolute().as_uri()}?mode=ro"
    position = -1
    try:
        with closing(sqlite3.connect(address, uri=True, timeout=BUSY_S)) as connection:
            while found := connection.execute(_READ, (position, PAGE_ROWS)).fetchall():
                for _, *row in found:
                    yield Row(*row)
                position = found[-1][0]
    except sqlite3.Error as error:
        raise LogUnavailable(f"the outcome log {path} cannot be read: {error}") from error
