"""A lease in Redis."""

from contextlib import suppress

from redis.exceptions import RedisError

from services.runtime.redis_client import RedisUnavailable, ask, open_client
from services.scheduler.leadership.keeper import LeaseUnavailable

# Gives the lease to the caller if it holds it or it is free, and returns its holder.
#
# A Redis that has restarted, from an older snapshot or from nothing, or was flushed, may not know
# of a holder. The second key marks since when its data is whole. For the time of a lease from then
# on and from its start, only a leader may take a free lease. The uptime is in whole seconds.
_CLAIM = """
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local since_ms = tonumber(redis.call('GET', KEYS[2]))
if not since_ms or since_ms > now_ms then
    redis.call('SET', KEYS[2], now_ms)
    since_ms = now_ms
end
local holder = redis.call('GET', KEYS[1])
local server = redis.call('INFO', 'server')
local uptime_s = tonumber(string.match(server, 'uptime_in_seconds:(%d+)'))
local known_ms = math.min(now_ms - since_ms, (uptime_s - 1) * 1000)
local settled = ARGV[3] == '1' or known_ms >= tonumber(ARGV[2])
if holder == ARGV[1] or (not holder and settled) then
    redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
    return ARGV[1]
end
return holder or ''
"""
_RELEASE = """
if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end
return ''
"""


class RedisLease:
    """A lease by name; `token` identifies the caller.

    The Redis user needs EVAL, TIME and INFO, and GET, SET and DEL on `{<name>}:lease` and
    `{<name>}:since`.
    Redis measures the time of the lease by its own clock, which must not jump.
    """

    def __init__(self, url: str, name: str, token: str, lease_s: float):
        """Does not connect yet. Raises ValueError for an invalid URL."""
        self._redis, address = open_client(url, "scheduler.lease_url")
        self._what = f"the lease {name} on {address}"
        # The braces mark the hashed part of a key: in a cluster both keys must be on one node.
        self._keys = f"{{{name}}}:lease", f"{{{name}}}:since"
        self._token, self._lease_ms = token, round(lease_s * 1000)

    async def claim(self, leads: bool, limit_s: float) -> str:
        return await self._eval(_CLAIM, limit_s, self._token, self._lease_ms, int(leads))

    async def release(self, limit_s: float) -> None:
        await self._eval(_RELEASE, limit_s, self._token)

    async def close(self) -> None:
        with suppress(RedisError, OSError):
            await self._redis.aclose()

    async def _eval(self, script: str, limit_s: float, *arguments: str | int) -> str:
        command = self._redis.eval(script, len(self._keys), *self._keys, *map(str, arguments))
        try:
            holder: bytes = await ask(command, self._what, limit_s)
        except RedisUnavailable as error:
            raise LeaseUnavailable(str(error)) from error
        return holder.decode()
