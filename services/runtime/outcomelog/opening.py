"""Opens the outcome log that a setting names."""

from collections.abc import Callable

from services.runtime.outcomelog.interface import OutcomeLog
from services.runtime.outcomelog.memory import MemoryLog
from services.runtime.outcomelog.sqlite import SqliteLog

STREAM = "foretoken:outcomes"


def open_log(where: str, rows_max: int, stream: str = STREAM) -> OutcomeLog:
    """`redis://…` or `rediss://…`: `stream` on that Redis; empty: in memory; else an SQLite file.

    Raises ValueError, with a sentence for the user, if no log can be opened there.
    """
    if rows_max < 1:
        raise ValueError(f"an outcome log keeps at least 1 row, not {rows_max}")
    if not where:
        return MemoryLog(rows_max)
    scheme, separator, _ = where.partition("://")
    if not separator:
        return SqliteLog.open(where, rows_max)
    if scheme not in _SCHEMES:
        known = ", ".join(f"{name}://" for name in _SCHEMES)
        raise ValueError(f"an outcome log is a file, or at {known}; {scheme}:// is not known")
    return _SCHEMES[scheme](where, stream, rows_max)


def _redis(url: str, stream: str, rows_max: int) -> OutcomeLog:
    from services.runtime.outcomelog.stream import RedisLog  # takes 0.15 s, only with Redis

    return RedisLog(url, stream, rows_max)


_SCHEMES: dict[str, Callable[[str, str, int], OutcomeLog]] = {"redis": _redis, "rediss": _redis}
