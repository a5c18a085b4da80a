"""The SQLite file of an outcome log: opens and checks it, and moves an unusable file aside.

Several processes share the file. A process holds `<name>.lock` while it opens or replaces the file.
Otherwise two processes that find it corrupt would both move it, the second one the new file of the
first.
"""

import fcntl
import logging
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from services.runtime.outcomelog.interface import LogUnavailable

log = logging.getLogger(__name__)

T = TypeVar("T")

SCHEMA = 1  # `PRAGMA user_version` of new files
BUSY_S = 2.0  # wait for another process; its write takes milliseconds
ASIDE_MAX = 8  # files kept aside per label; the oldest is replaced
_CORRUPT = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
_SIDECARS = ("-wal", "-shm")
# The checks reject rows of other programs that have wrong types.
_TABLE = """
    CREATE TABLE outcomes (
        position INTEGER PRIMARY KEY AUTOINCREMENT,
        kind TEXT NOT NULL CHECK (typeof(kind) = 'text'),
        version INTEGER NOT NULL CHECK (typeof(version) = 'integer'),
        payload BLOB NOT NULL CHECK (typeof(payload) = 'blob')
    )
"""


class NotALog(ValueError):
    """The file belongs to another program. It is left unchanged."""


class _UnusableFile(Exception):
    """The file must be moved aside. `label` is part of the new name."""

    def __init__(self, label: str, reason: str):
        super().__init__(reason)
        self.label = label


class LogFile:
    """A connection to a valid log at `path`. Used by one thread at a time."""

    def __init__(self, path: Path):
        self.path = path.expanduser().absolute()
        self.replaced = False  # whether an unusable file was moved aside
        self._connection: sqlite3.Connection | None = None
        self._identity: tuple[int, int] | None = None  # of the open file

    def run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """The result of `work`, which is repeated on a new file if the file is corrupt, and must
        therefore have no effect when it raises. Raises LogUnavailable."""
        try:
            try:
                return work(self._connected())
            except sqlite3.DatabaseError as error:
                if not _is_corrupt(error):
                    raise
                self._replace(error)
            return work(self._connected())
        except (sqlite3.Error, OSError, _UnusableFile, NotALog) as error:
            self.close()
            raise LogUnavailable(f"the outcome log {self.path} cannot be used: {error}") from error

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(sqlite3.Error):
                connection.close()

    def _connected(self) -> sqlite3.Connection:
        """The connection; a new one if another process has replaced the file."""
        if self._connection is not None and _identity(self.path) != self._identity:
            log.info("another process replaced the outcome log %s; opening the new file", self.path)
            self.close()
        return self._connection or self._connect()

    def _connect(self) -> sqlite3.Connection:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(self.path):
            try:
                self._connection = _open(self.path)
            except _UnusableFile as error:
                _move_aside(self.path, error)
                self.replaced = True
                self._connection = _open(self.path)
            self._identity = _identity(self.path)
        return self._connection

    def _replace(self, error: sqlite3.DatabaseError) -> None:
        """Moves the open file aside, unless another process has done so."""
        corrupt = self._identity
        self.close()
        with _locked(self.path):
            if corrupt is not None and _identity(self.path) == corrupt:
                _move_aside(self.path, _UnusableFile("corrupt", str(error)))
                self.replaced = True


def _open(path: Path) -> sqlite3.Connection:
    """A connection to a valid file with the table. Raises _UnusableFile, NotALog, sqlite3.Error.

    The check reads the whole file: about 0.1 s for 50,000 rows of 1.5 kB.
    """
    connection = sqlite3.connect(
        path, timeout=BUSY_S, isolation_level=None, check_same_thread=False
    )
    try:
        _prepare(connection, path)
    except sqlite3.DatabaseError as error:
        connection.close()
        if _is_corrupt(error) or _code(error) == sqlite3.SQLITE_ERROR:  # missing table or column
            raise _UnusableFile("corrupt", str(error)) from error
        raise
    except Exception:
        connection.close()
        raise
    return connection


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > SCHEMA:
        raise _UnusableFile(
            "future", f"its schema has version {version}, this foretoken reads version {SCHEMA}"
        )
    if not version and connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
        raise NotALog(f"{path} is a database of another program; name another file")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")  # a power failure may lose the last rows
    if not version:
        _create(connection)
    connection.execute("SELECT position, kind, version, payload FROM outcomes LIMIT 0")
    (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if verdict != "ok":
        raise _UnusableFile("corrupt", verdict)


def _create(connection: sqlite3.Connection) -> None:
    """Positions start at the time in microseconds, above those of any earlier file, so that readers
    of the log miss no row."""
    with connection:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute(_TABLE)
        start = time.time_ns() // 1000
        connection.execute("INSERT INTO sqlite_sequence VALUES ('outcomes', ?)", (start,))
        connection.execute(f"PRAGMA user_version = {SCHEMA}")


def _move_aside(path: Path, unusable: _UnusableFile) -> None:
    """Renames the file with its -wal and -shm. Those first: SQLite would replay a remaining -wal
    into the new file."""
    names = [path.with_name(f"{path.name}.{unusable.label}-{n}") for n in range(1, ASIDE_MAX + 1)]
    aside = min(names, key=lambda name: name.stat().st_ctime_ns if name.exists() else 0)
    for sidecar in (*_SIDECARS, ""):
        Path(f"{aside}{sidecar}").unlink(missing_ok=True)
        with suppress(FileNotFoundError):
            Path(f"{path}{sidecar}").rename(f"{aside}{sidecar}")
    log.warning(
        "the outcome log %s is unusable (%s): moved it to %s and started a new one",
        path,
        unusable,
        aside,
    )


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds the lock file. Raises OSError."""
    with Path(f"{path}.lock").open("a") as file:
        until = time.monotonic() + BUSY_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise TimeoutError(f"another process holds {file.name}") from None
                time.sleep(0.01)
        yield


def _identity(path: Path) -> tuple[int, int] | None:
    """Device and inode of the file at the path, by stat: opening and closing the file would release
    SQLite's locks."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _is_corrupt(error: sqlite3.Error) -> bool:
    return _code(error) in _CORRUPT


def _code(error: sqlite3.Error) -> int:
    """The primary result code; -1 for errors that SQLite did not raise."""
    return getattr(error, "sqlite_errorcode", -1) & 0xFF
