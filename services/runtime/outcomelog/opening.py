"""Opens the outcome log at a path or URL."""

from collections.abc import Callable

from services.runtime.outcomelog.interface import OutcomeLog
from services.runtime.outcomelog.memory import MemoryLog
from services.runtime.outcomelog.sqlite import SqliteLog

STREAM = "foretoken:outcomes"


def open_log(where: str, rows_max: int, stream: str = STREAM) -> OutcomeLog:
    """Opens the log: empty in memory, `redis://…` or `rediss://…` as a Redis stream, else an SQLite
    file. Raises ValueError."""
    if rows_max < 1:
        raise ValueError(f"log.rows_max must be at least 1, got {rows_max}")
    if not where:
        return MemoryLog(rows_max)
    scheme, separator, _ = where.partition("://")
    if not separator:
        return SqliteLog.open(where, rows_max)
    if scheme not in _SCHEMES:
        known = ", ".join(f"{name}://" for name in _SCHEMES)
        raise ValueError(
            f"log.path (the outcome log) must be a file or start with {known}, got {scheme}://"
        )
    return _SCHEMES[scheme](where, stream, rows_max)


def _redis(url: str, stream: str, rows_max: int) -> OutcomeLog:
    from services.runtime.outcomelog.stream import RedisLog  # takes 0.15 s

    return RedisLog(url, stream, rows_max)


_SCHEMES: dict[str, Callable[[str, str, int], OutcomeLog]] = {"redis": _redis, "rediss": _redis}
