"""Copies of the processes' event logs in the file that they share: each follows the responses that
the others run."""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Set
from dataclasses import dataclass

from gateway.faces.http.responses.database import READ_WAIT_S, WRITE_WAIT_S, Database
from gateway.faces.http.responses.event_log import EventNews, check_kept
from services.runtime.errors import Code, ServiceError

POLL_S = 0.2  # between two looks of a reader that has all events
SCHEMA = (
    """CREATE TABLE IF NOT EXISTS logs (
    response TEXT PRIMARY KEY, process TEXT NOT NULL, first INTEGER NOT NULL, ended INTEGER NOT NULL
)""",
    """CREATE TABLE IF NOT EXISTS events (
    response TEXT NOT NULL, number INTEGER NOT NULL, data BLOB NOT NULL,
    PRIMARY KEY (response, number)
)""",
    """CREATE TRIGGER IF NOT EXISTS log_removed AFTER DELETE ON logs BEGIN
    DELETE FROM events WHERE response = old.response;
END""",
)
# A log without further events is one row without a number.
READ = """SELECT ended, number, data FROM logs LEFT JOIN events
ON events.response = logs.response AND number > ? WHERE logs.response = ? ORDER BY number"""
GONE = "it was deleted, or its gateway process has restarted or keeps no events of it any more"


@dataclass(frozen=True, slots=True)
class LogPart:
    """The events of a log behind a number, the first of them numbered `begin`."""

    begin: int
    events: tuple[bytes, ...]
    ended: bool  # no event follows these


class EventCopies:
    """The copies of all processes' logs; those of this one are bounded as its logs are. `read` does
    not wait for processes that write. `write` and `drop` do: call them in a thread."""

    def __init__(self, file: str, process: str):
        """`process`: the name of this one. Raises sqlite3.Error."""
        self._process = process
        self._copied: Set[str] = frozenset()
        self._written = Database(file, WRITE_WAIT_S)
        with self._written.transaction():
            for statement in SCHEMA:
                self._written.run(statement)
            self._written.run("DELETE FROM logs WHERE process = ?", process)
        self._read = Database(file, READ_WAIT_S)

    def write(self, news: Mapping[str, EventNews], kept: Set[str]) -> None:
        """Adds what is new in this process's logs, and drops the copies of all but the `kept`.
        O(new and dropped events)."""
        run = self._written.run
        with self._written.transaction():
            for response_id in self._copied - kept:
                run("DELETE FROM logs WHERE response = ?", response_id)
            for response_id, each in news.items():
                run(
                    "INSERT INTO logs VALUES (?, ?, ?, ?) ON CONFLICT (response) DO UPDATE "
                    "SET first = excluded.first, ended = excluded.ended",
                    *(response_id, self._process, each.first, each.ended),
                )
                drop = "DELETE FROM events WHERE response = ? AND number < ?"
                run(drop, response_id, each.first)
                for number, event in enumerate(each.events, each.begin):
                    run("INSERT INTO events VALUES (?, ?, ?)", response_id, number, event)
        self._copied = frozenset(kept)

    def drop(self, response_id: str) -> None:
        """Drops the copy of a log, of whichever process. O(its events)."""
        self._written.run("DELETE FROM logs WHERE response = ?", response_id)

    def read(self, response_id: str, after: int) -> LogPart | None:
        """The events behind a number; None if there is no log of this response."""
        rows = self._read.run(READ, after, response_id)
        if not rows:
            return None
        ended, begin, _ = rows[0]
        events = tuple(data for _, number, data in rows if number is not None)
        return LogPart(after + 1 if begin is None else begin, events, bool(ended))

    def follow(self, response_id: str, after: int | None) -> AsyncGenerator[bytes] | None:
        """The events behind a number, or all that are kept, as they come; None if there is no log.
        Raises InvalidArgument if the next one is not kept, at once or once the reader is too slow,
        and ServiceError once the log is gone."""
        rows = self._read.run("SELECT first FROM logs WHERE response = ?", response_id)
        if not rows:
            return None
        ((first,),) = rows
        after = first - 1 if after is None else after
        check_kept(after, first)
        return self._follow(response_id, after)

    async def _follow(self, response_id: str, after: int) -> AsyncGenerator[bytes]:
        while part := self.read(response_id, after):
            check_kept(after, part.begin)
            if part.events:
                after += len(part.events)
                yield b"".join(part.events)
            if part.ended:
                return
            if not part.events:
                await asyncio.sleep(POLL_S)
        raise ServiceError(Code.UNAVAILABLE, GONE)
