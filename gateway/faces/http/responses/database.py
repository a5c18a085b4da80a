"""The file in which gateway processes of one machine share responses."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Any

# The longest waits for another process that writes: of methods that a thread calls, and of those
# that the event loop calls.
WRITE_WAIT_S, READ_WAIT_S = 5.0, 0.005


class Database:
    """A connection that threads use in turn."""

    def __init__(self, file: str, wait_s: float):
        self._lock = RLock()  # `run` within a transaction
        self._connection = sqlite3.connect(
            file, timeout=wait_s, check_same_thread=False, isolation_level=None
        )
        for statement in ("PRAGMA journal_mode = WAL", "PRAGMA synchronous = OFF"):
            self.run(statement)

    def run(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        """The rows of a statement, which is a transaction of its own outside of `transaction`."""
        with self._lock:
            return self._connection.execute(statement, values).fetchall()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All statements of the block take effect, or none."""
        with self._lock:
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.commit()
            finally:
                self._connection.rollback()  # nothing if the block is committed
