"""Limits of API keys that several gateways share through Redis.

Redis decides on each request, in one round trip. While it does not answer, the gateway keeps to its
part of the limits, by the number of gateways that it knew last, and tries to reach Redis again. It
returns under a new name with the requests that it runs, so that lost messages leave no trace.
"""

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from typing import Any, cast

from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from gateway.admission.key_limits import Change, Grant, KeyLimiter, KeyUsage, make_grant
from gateway.admission.limit_scripts import BEAT, TAKE
from gateway.types.errors import RefusalReason
from gateway.types.key_limits import AMOUNTS
from services.runtime.redis_client import RedisUnavailable, ask, open_client

log = logging.getLogger(__name__)

MAX_BATCH = 256  # changes in one round trip
BEAT_S = 1.0  # between two signs of life
SILENCE_S = 5.0  # after which a gateway counts as gone
JOIN_S = 1.0  # bound on joining, for which no request waits
LEAVE_S = 0.5
RETRY_S = 0.5  # between two attempts to join
UNKNOWN = b"unknown"  # the gateway's counts have expired


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of Redis to a request: the limit that it exceeds, and what is left of those a
    minute."""

    exceeded: RefusalReason | None
    requests: float
    tokens: float


@dataclass(frozen=True, slots=True)
class _Message:
    """A change for Redis. With `answer`, Redis may refuse it; None: Redis only counts it."""

    usage: KeyUsage
    change: Change
    answer: asyncio.Future[Answer | None] | None = None


class SharedLimits:
    """Shares the usage of `keys` while `run` runs.

    The Redis user needs EVAL, TIME, EXISTS, HSET, HMGET, HINCRBY, HDEL, ZADD, ZREM, ZRANGE,
    ZREMRANGEBYSCORE, ZCARD, PEXPIRE, DEL, MULTI and EXEC on `{<name>}:*`.
    """

    def __init__(self, keys: KeyLimiter, url: str, name: str, wait_s: float, gateways: int):
        """Does not connect yet. `wait_s` bounds a round trip. `gateways` divide the limits until
        Redis answers. Raises ValueError for an invalid URL."""
        self._redis, address = open_client(url, "gateway.limits_url")
        # A batch that was sent twice would count twice.
        self._redis.set_retry(Retry(NoBackoff(), 0))
        self._what = f"the shared limits {name} on {address}"
        # The braces mark the hashed part of a key: in a cluster all keys must be on one node.
        self._prefix = f"{{{name}}}"
        self._set = f"{self._prefix}:gateways"
        self._own = ""  # this gateway's name in Redis
        self._keys, self._wait_s, self._gateways = keys, wait_s, gateways
        self._messages: deque[_Message] = deque()  # of one round trip at most
        self._sent: Sequence[_Message] = ()
        self._news = asyncio.Event()
        self._reports = False  # changes are sent to Redis
        self._decides = False  # Redis is asked
        self._outage_logged = False
        self._next_beat_s = 0.0
        keys.report = self._report

    @property
    def shared(self) -> bool:
        """Whether the limits are shared now."""
        return self._decides

    async def reserve(self, key: str, tokens: Sequence[int], drain_s: float) -> Grant | None:
        """As KeyLimiter.reserve, of the limits of all gateways."""
        usage = self._keys.find(key, time.monotonic())
        if usage is None or not (self._decides and usage.whole.amounts):
            return self._keys.reserve(key, tokens, time.monotonic(), drain_s)
        grant = make_grant(usage, tokens)
        answering: asyncio.Future[Answer | None] = asyncio.get_running_loop().create_future()
        self._send(_Message(usage, grant.taken, answering))
        try:
            answer = await answering
        except asyncio.CancelledError:
            if not answering.cancelled() and (late := answering.result()) and not late.exceeded:
                grant.cancel(time.monotonic())
            raise
        if answer is None:
            return self._keys.reserve(key, tokens, time.monotonic(), drain_s)
        if answer.exceeded:
            raise usage.refuse(answer.exceeded, sum(tokens), time.monotonic(), drain_s)
        return grant

    async def run(self) -> None:
        """Shares the limits until it is cancelled."""
        try:
            while True:
                try:
                    await self._join()
                    while True:
                        await self._exchange()
                except RedisUnavailable as error:
                    self._on_lost(str(error))
                await asyncio.sleep(RETRY_S)
        finally:
            self._stop_sharing()
            await self._leave()

    def _report(self, usage: KeyUsage, change: Change) -> None:
        if self._reports and usage.whole.amounts:
            self._send(_Message(usage, change))

    def _send(self, message: _Message) -> None:
        self._messages.append(message)
        self._news.set()

    async def _join(self) -> None:
        """Adds this gateway with what it runs, under a new name."""
        before, self._own = self._own, f"{self._prefix}:gateway:{secrets.token_hex(8)}"
        self._reports = True  # what happens from here on
        counts: dict[str, int] = {"joined": 1}  # an empty hash does not exist
        for usage in self._keys.running():
            counts[f"running:{usage.name}"] = usage.running
            counts[f"queued:{usage.name}"] = usage.queued_tokens
        pipe = self._redis.pipeline(transaction=True)
        if before:
            pipe.delete(before)
            pipe.zrem(self._set, before)
        pipe.hset(self._own, mapping=cast(Any, counts))
        self._beat(pipe)
        *_, gateways = await ask(pipe.execute(), self._what, JOIN_S)
        self._on_beat(gateways)
        self._keys.divide(1, time.monotonic())
        self._decides = True
        if self._outage_logged:
            log.info("%s is back: the gateways share the limits of API keys again", self._what)
        self._outage_logged = False

    async def _exchange(self) -> None:
        """Sends what has accumulated, once there is something or a sign of life is due."""
        with suppress(TimeoutError):
            async with asyncio.timeout_at(self._next_beat_s):
                await self._news.wait()
        self._sent = [self._messages.popleft() for _ in range(min(MAX_BATCH, len(self._messages)))]
        if not self._messages:
            self._news.clear()
        pipe = self._redis.pipeline(transaction=False)
        for message in self._sent:
            self._take(pipe, message)
        beats = asyncio.get_running_loop().time() >= self._next_beat_s
        if beats:
            self._beat(pipe)
        replies = await ask(pipe.execute(), self._what, self._wait_s)
        if beats:
            self._on_beat(replies.pop())
        for message, (exceeded, *left) in zip(self._sent, replies, strict=True):
            if exceeded == UNKNOWN:
                raise RedisUnavailable(f"{self._what} has forgotten this gateway")
            reason = RefusalReason(exceeded.decode()) if exceeded else None
            self._on_answer(message, Answer(reason, *map(float, left)))
        self._sent = ()

    def _take(self, pipe: Any, message: _Message) -> None:
        name, amounts = message.usage.name, message.usage.whole.amounts
        keys = (f"{self._prefix}:key:{name}", self._own, self._set)
        most = (amounts.get(amount, 0) for amount in AMOUNTS)
        keeps = int(message.answer is not None)
        pipe.eval(TAKE, len(keys), *keys, name, *most, keeps, *astuple(message.change))

    def _beat(self, pipe: Any) -> None:
        pipe.eval(BEAT, 2, self._own, self._set, round(SILENCE_S * 1000))

    def _on_beat(self, gateways: int) -> None:
        if not gateways:
            raise RedisUnavailable(f"{self._what} has forgotten this gateway")
        self._gateways = gateways
        self._next_beat_s = asyncio.get_running_loop().time() + BEAT_S

    def _on_answer(self, message: _Message, answer: Answer) -> None:
        usage, now_s = message.usage, time.monotonic()
        if message.answer is None:
            return
        if not answer.exceeded:
            usage.apply(message.change, now_s)
        usage.set_left(answer.requests, answer.tokens, now_s)
        if not message.answer.cancelled():
            message.answer.set_result(answer)
        elif not answer.exceeded:
            usage.change(-message.change, now_s)

    def _on_lost(self, why: str) -> None:
        self._stop_sharing()
        if not self._outage_logged:
            log.warning(
                "%s; each gateway keeps to 1/%d of the limits of API keys until it is back",
                why,
                self._gateways,
            )
        self._outage_logged = True

    def _stop_sharing(self) -> None:
        self._reports = self._decides = False
        self._keys.divide(self._gateways, time.monotonic())
        unanswered = (*self._sent, *self._messages)
        self._sent = ()
        self._messages.clear()
        self._news.clear()
        for message in unanswered:
            if message.answer is not None and not message.answer.done():
                message.answer.set_result(None)

    async def _leave(self) -> None:
        """Removes this gateway; without Redis, its counts expire."""
        pipe = self._redis.pipeline(transaction=True)
        pipe.delete(self._own)
        pipe.zrem(self._set, self._own)
        with suppress(RedisUnavailable):
            await ask(pipe.execute(), self._what, LEAVE_S)
        with suppress(RedisError, OSError):
            await self._redis.aclose()
