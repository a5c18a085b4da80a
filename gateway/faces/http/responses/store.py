"""The responses that clients may name again, within a number and a size."""

import json
import sqlite3
import time
from collections.abc import Sequence, Set
from contextlib import suppress
from dataclasses import dataclass

from gateway.faces.http.responses.database import READ_WAIT_S, WRITE_WAIT_S, Database
from services.runtime.config import ConfigError

Entry = dict[str, object]

IN_MEMORY = ":memory:"
CUT_CALL = ("function_call", "incomplete")
SCHEMA = (
    """CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, content TEXT NOT NULL, inputs TEXT NOT NULL,
    bytes INTEGER NOT NULL, used_s REAL NOT NULL, running INTEGER NOT NULL, process TEXT NOT NULL,
    cancelled INTEGER NOT NULL DEFAULT 0
)""",
    "CREATE INDEX IF NOT EXISTS by_use ON responses (running, used_s)",
    """CREATE TABLE IF NOT EXISTS totals (
    id INTEGER PRIMARY KEY, number INTEGER NOT NULL, bytes INTEGER NOT NULL
)""",
    "INSERT OR IGNORE INTO totals VALUES (0, 0, 0)",
    """CREATE TRIGGER IF NOT EXISTS added AFTER INSERT ON responses BEGIN
    UPDATE totals SET number = number + 1, bytes = bytes + new.bytes;
END""",
    """CREATE TRIGGER IF NOT EXISTS removed AFTER DELETE ON responses BEGIN
    UPDATE totals SET number = number - 1, bytes = bytes - old.bytes;
END""",
)
# What an earlier process of this name has left.
FAIL = """UPDATE responses SET running = 0, content = json_set(
    content, '$.status', 'failed', '$.error', json(?)
) WHERE running = 1 AND process = ?"""
RESTARTED = {"code": "server_error", "message": "the gateway restarted; send the request again"}
# The response that was used longest ago, if the store exceeds a limit; those that still run last.
EVICT = """DELETE FROM responses
WHERE id = (SELECT id FROM responses ORDER BY running, used_s LIMIT 1)
AND EXISTS (SELECT 1 FROM totals WHERE number > ? OR bytes > ?) RETURNING id"""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response as its client receives it, and all items before its output."""

    response_id: str
    owner: str  # the name of the API key that created it; no other key reads it
    content: Entry
    inputs: Sequence[Entry]
    running: bool = False  # in the background

    @property
    def items(self) -> Sequence[Entry]:
        """The items up to its end, which the next response begins with: without a call that a
        limit has cut, and without the scores of tokens."""
        output = self.content["output"]
        assert isinstance(output, list)
        said = [each for each in output if (each["type"], each["status"]) != CUT_CALL]
        return [*self.inputs, *map(_without_scores, said)]


class ResponseStore:
    """Keeps the responses that were used last. Safe in any thread.

    With a file, the gateway processes of one machine share them. `find`, `runs` and `wanted` do not
    wait for processes that write. The other methods do: call them in a thread. Each operation takes
    O(size of one response + log of their number), and `keep` the same for each one that it evicts.
    """

    def __init__(self, file: str, max_count: int, max_bytes: int, process: str = ""):
        """`file`: empty for a store of this process alone. `process`: its name among those that
        share the file. Raises ConfigError if the file is none that this process can write."""
        self.shared, self._process = bool(file), process
        self._max_count, self._max_bytes = max_count, max_bytes
        try:
            self._written = Database(file or IN_MEMORY, WRITE_WAIT_S)
            with self._written.transaction():
                for statement in SCHEMA:
                    self._written.run(statement)
                self._written.run(FAIL, _encode(RESTARTED), process)
            self._read = Database(file, READ_WAIT_S) if file else self._written
        except sqlite3.Error as error:
            raise ConfigError(f"gateway.responses_file: {file} cannot be used: {error}") from None

    def keep(self, stored: StoredResponse) -> None:
        """Adds a response; those that were used longest ago make room."""
        with self._written.transaction():
            self._insert(stored)

    def finish(self, stored: StoredResponse) -> None:
        """Replaces a running response by its end, unless it was deleted."""
        with self._written.transaction():
            delete = "DELETE FROM responses WHERE id = ? RETURNING id"
            if self._written.run(delete, stored.response_id):
                self._insert(stored)

    def find(self, response_id: str, owner: str) -> StoredResponse | None:
        """None if there is none, it was evicted, or another owner has it."""
        rows = self._read.run(
            "SELECT content, inputs, running FROM responses WHERE id = ? AND owner = ?",
            response_id,
            owner,
        )
        if not rows:
            return None
        with suppress(sqlite3.OperationalError):  # another process writes: the use is not noted
            used = "UPDATE responses SET used_s = ? WHERE id = ?"
            self._read.run(used, time.time(), response_id)
        ((content, inputs, running),) = rows
        return StoredResponse(
            response_id, owner, json.loads(content), json.loads(inputs), bool(running)
        )

    def delete(self, response_id: str, owner: str) -> bool:
        """Whether there was one."""
        statement = "DELETE FROM responses WHERE id = ? AND owner = ? RETURNING id"
        return bool(self._written.run(statement, response_id, owner))

    def cancel(self, response_id: str) -> None:
        """Asks the process that runs a response to end it."""
        self._written.run("UPDATE responses SET cancelled = 1 WHERE id = ?", response_id)

    def runs(self, response_id: str) -> bool:
        """Whether a response has not ended, whichever process runs it."""
        statement = "SELECT id FROM responses WHERE id = ? AND running = 1"
        return bool(self._read.run(statement, response_id))

    def wanted(self) -> Set[str]:
        """The ids of running responses that are neither deleted nor cancelled."""
        rows = self._read.run("SELECT id FROM responses WHERE running = 1 AND cancelled = 0")
        return {str(response_id) for (response_id,) in rows}

    def _insert(self, stored: StoredResponse) -> None:
        content, inputs = _encode(stored.content), _encode(stored.inputs)
        size = len(content.encode()) + len(inputs.encode())
        self._written.run(
            "INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?, ?, 0)",
            *(stored.response_id, stored.owner, content, inputs, size),
            *(time.time(), stored.running, self._process),
        )
        while self._written.run(EVICT, self._max_count, self._max_bytes):
            pass


def _without_scores(item: Entry) -> Entry:
    if item["type"] != "message":
        return item
    parts = item["content"]
    assert isinstance(parts, list)
    return {**item, "content": [{**part, "logprobs": []} for part in parts]}


def _encode(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
