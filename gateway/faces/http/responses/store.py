"""The responses that clients may name again, within a number and a size."""

import json
import sqlite3
import time
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock

from services.runtime.config import ConfigError

Entry = dict[str, object]

IN_MEMORY = ":memory:"
BUSY_S = 5.0  # the longest wait for another process that writes
TABLE = """CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, content TEXT NOT NULL, conversation TEXT NOT NULL,
    bytes INTEGER NOT NULL, used_s REAL NOT NULL, running INTEGER NOT NULL, process TEXT NOT NULL,
    cancelled INTEGER NOT NULL DEFAULT 0
)"""
# What an earlier process of this name has left.
FAIL = """UPDATE responses SET running = 0, content = json_set(
    content, '$.status', 'failed', '$.error', json(?)
) WHERE running = 1 AND process = ?"""
RESTARTED = {"code": "server_error", "message": "the gateway restarted; send the request again"}
# Of all but the most recent ones that fit; those that still run last.
EVICT = """DELETE FROM responses WHERE id IN (
    SELECT id FROM (
        SELECT id, row_number() OVER latest AS number, sum(bytes) OVER latest AS total
        FROM responses
        WINDOW latest AS (ORDER BY running DESC, used_s DESC ROWS UNBOUNDED PRECEDING)
    ) WHERE number > ? OR total > ?
)"""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response as its client receives it, and the chat messages up to its end."""

    response_id: str
    owner: str  # the name of the API key that created it; no other key reads it
    content: Entry
    conversation: Sequence[Entry]
    running: bool = False  # in the background


class ResponseStore:
    """Keeps the responses that were used last. Safe in any thread.

    With a file, the gateway processes of one machine share them. Each operation takes O(size of one
    response), and `keep` O(number of responses).
    """

    def __init__(self, file: str, max_count: int, max_bytes: int, process: str = ""):
        """`file`: empty for a store of this process alone. `process`: its name among those that
        share the file. Raises ConfigError if the file is none that this process can write."""
        self.shared, self._process = bool(file), process
        self._max_count, self._max_bytes = max_count, max_bytes
        self._lock = Lock()
        try:
            self._database = sqlite3.connect(
                file or IN_MEMORY, timeout=BUSY_S, check_same_thread=False, isolation_level=None
            )
            for statement in ("PRAGMA journal_mode = WAL", "PRAGMA synchronous = OFF", TABLE):
                self._database.execute(statement)
            self._database.execute(FAIL, (_encode(RESTARTED), process))
        except sqlite3.Error as error:
            raise ConfigError(f"gateway.responses_file: {file} cannot be used: {error}") from None

    def keep(self, stored: StoredResponse) -> None:
        """Adds a response; those that were used longest ago make room."""
        content, conversation = _encode(stored.content), _encode(stored.conversation)
        size = len(content.encode()) + len(conversation.encode())
        row = (
            *(stored.response_id, stored.owner, content, conversation, size),
            *(time.time(), stored.running, self._process),
        )
        with self._transaction() as database:
            database.execute(
                "INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?, ?, 0)",
                row,
            )
            database.execute(EVICT, (self._max_count, self._max_bytes))

    def finish(self, stored: StoredResponse) -> None:
        """Replaces a running response by its end, unless it was deleted."""
        with self._lock:
            found = self._database.execute(
                "DELETE FROM responses WHERE id = ?", (stored.response_id,)
            )
        if found.rowcount:
            self.keep(stored)

    def find(self, response_id: str, owner: str) -> StoredResponse | None:
        """None if there is none, it was evicted, or another owner has it."""
        with self._lock:
            rows = self._database.execute(
                "UPDATE responses SET used_s = ? WHERE id = ? AND owner = ?"
                " RETURNING content, conversation, running",
                (time.time(), response_id, owner),
            ).fetchall()
        if not rows:
            return None
        ((content, conversation, running),) = rows
        return StoredResponse(
            response_id, owner, json.loads(content), json.loads(conversation), bool(running)
        )

    def delete(self, response_id: str, owner: str) -> bool:
        """Whether there was one."""
        with self._lock:
            found = self._database.execute(
                "DELETE FROM responses WHERE id = ? AND owner = ?", (response_id, owner)
            )
        return found.rowcount > 0

    def cancel(self, response_id: str) -> None:
        """Asks the process that runs a response to end it."""
        with self._lock:
            self._database.execute(
                "UPDATE responses SET cancelled = 1 WHERE id = ?", (response_id,)
            )

    def wanted(self) -> Set[str]:
        """The ids of running responses that are neither deleted nor cancelled."""
        with self._lock:
            rows = self._database.execute(
                "SELECT id FROM responses WHERE running = 1 AND cancelled = 0"
            ).fetchall()
        return {response_id for (response_id,) in rows}

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield self._database
            except BaseException:
                self._database.execute("ROLLBACK")
                raise
            self._database.execute("COMMIT")


def _encode(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
