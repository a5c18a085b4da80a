"""The outcome log as a Redis stream, for services replicated over several hosts."""

import logging
import secrets
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from typing import Any, TypeVar, cast

from redis.exceptions import RedisError

from services.runtime.outcomelog.interface import Entry, LogUnavailable, Row
from services.runtime.redis_client import RedisUnavailable, ask, open_client

log = logging.getLogger(__name__)

T = TypeVar("T")
Fields = dict[bytes, bytes] | None

CALL_TIMEOUT_S = 4.0  # of a whole call: name lookup, connecting, a few MiB, and one retry
WRITER_TTL_S = 7 * 86_400  # for how long a repeated batch is recognized
# Stores the rows and the number of their batch atomically, so that a repeated batch is recognized.
_APPEND = """
if redis.call('GET', KEYS[2]) == ARGV[1] then return 0 end
for i = 4, #ARGV, 3 do
    redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[2], '*',
               'kind', ARGV[i], 'version', ARGV[i + 1], 'payload', ARGV[i + 2])
end
redis.call('SET', KEYS[2], ARGV[1], 'EX', ARGV[3])
return 1
"""


class RedisLog:
    """One stream, trimmed by Redis to approximately `rows_max` entries.

    The Redis user needs EVAL, XADD, XRANGE, GET and SET on `<stream>` and `{<stream>}:writer:*`.
    Connects on demand: without Redis, calls raise LogUnavailable within CALL_TIMEOUT_S, and they
    succeed as soon as Redis is back. No message contains the password.
    """

    replaced = False

    def __init__(self, url: str, stream: str, rows_max: int):
        """Does not connect yet. Raises ValueError for an invalid URL."""
        self._redis, address = open_client(url, "log.path")
        self._name = f"the outcome log {stream} on {address}"
        self._stream = stream
        self._rows_max = rows_max
        # The braces mark the hashed part of a key: in a cluster both keys must be on one node.
        self._writer = f"{{{stream}}}:writer:{secrets.token_hex(8)}"
        self._batch = 0  # number of the append, the same when it is repeated
        self._foreign_logged = False

    async def append(self, rows: Sequence[Row], again: bool = False) -> None:
        self._batch += not again
        flat = [value for row in rows for value in (row.kind, row.version, row.payload)]
        keys = (self._stream, self._writer)
        arguments = (self._batch, self._rows_max, WRITER_TTL_S, *flat)
        await self._ask(self._redis.eval(_APPEND, len(keys), *keys, *cast(Any, arguments)))

    async def read(self, after: str, limit: int) -> list[Entry]:
        """Skips entries of other programs, and reads until the page is full or the stream ends."""
        entries: list[Entry] = []
        while (wanted := limit - len(entries)) > 0:
            found = await self._range(after, wanted)
            entries += [entry for item in found if (entry := self._entry(*item))]
            if len(found) < wanted:
                break
            after = _position(found[-1][0])
        return entries

    async def close(self) -> None:
        with suppress(RedisError, OSError):
            await self._redis.aclose()

    async def _range(self, after: str, count: int) -> list[tuple[bytes, Fields]]:
        start = f"({_id(after)}" if after else "-"
        found = await self._ask(self._redis.xrange(self._stream, start, "+", count))
        return cast(list[tuple[bytes, Fields]], found)

    async def _ask(self, command: Awaitable[T]) -> T:
        try:
            return await ask(command, self._name, CALL_TIMEOUT_S)
        except RedisUnavailable as error:
            raise LogUnavailable(str(error)) from error

    def _entry(self, stream_id: bytes, fields: Fields) -> Entry | None:
        try:
            assert fields is not None
            row = Row(fields[b"kind"].decode(), int(fields[b"version"]), fields[b"payload"])
        except (AssertionError, KeyError, ValueError):
            self._log_foreign(stream_id)
            return None
        return Entry(_position(stream_id), row)

    def _log_foreign(self, stream_id: bytes) -> None:
        if not self._foreign_logged:
            self._foreign_logged = True
            log.warning(
                "%s contains entries that are not outcomes, the first at %s: they are ignored; "
                "check whether another program writes to this stream",
                self._name,
                stream_id.decode(),
            )


def _position(stream_id: bytes) -> str:
    """`milliseconds-sequence` with leading zeros, so that it sorts as a string."""
    milliseconds, _, sequence = stream_id.decode().partition("-")
    return f"{int(milliseconds):020d}-{int(sequence):020d}"


def _id(position: str) -> str:
    milliseconds, _, sequence = position.partition("-")
    return f"{int(milliseconds)}-{int(sequence)}"
