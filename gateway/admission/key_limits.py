"""Limits of API keys: tokens are reserved at admission and settled at the end. Pure.

A limit per minute is a token bucket (Turner, New directions in communications, 1986) that holds the
amount of a minute and refills evenly.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gateway.key_config import ALL_KEYS
from gateway.types.errors import KeyLimitReached, RefusalReason
from gateway.types.key_limits import KeyLimits
from services.runtime.errors import InvalidArgument

RATE_HEADERS = tuple(
    f"x-ratelimit-{what}-{unit}"
    for unit in ("requests", "tokens")
    for what in ("limit", "remaining", "reset")
)
MAX_KEYS = 65536  # of which usage is kept; those without any are forgotten first
MINUTE_S = 60.0
ROUNDING = 1e-6  # of a bucket's level


class Bucket:
    """What is left of an amount per minute. Below 0 after more was used than reserved."""

    def __init__(self, per_minute: int, now_s: float):
        self.per_minute = per_minute
        self._left, self._since_s = float(per_minute), now_s

    def left(self, now_s: float) -> float:
        refilled = max(0.0, now_s - self._since_s) * self.per_minute / MINUTE_S
        return min(self.per_minute, self._left + refilled)

    def take(self, amount: float, now_s: float) -> None:
        """Takes an amount, or returns a negative one."""
        self._left = min(self.per_minute, self.left(now_s) - amount)
        self._since_s = max(self._since_s, now_s)

    def wait_s(self, amount: float, now_s: float) -> float:
        """Seconds until so much is left, at most a full bucket; 0 if it is."""
        lacking = min(amount, self.per_minute) - self.left(now_s)
        return lacking * MINUTE_S / self.per_minute if lacking > ROUNDING else 0.0

    def headers(self, unit: str, now_s: float) -> Iterator[tuple[str, str]]:
        """OpenAI's headers; `reset`: until the bucket is full."""
        yield f"x-ratelimit-limit-{unit}", str(self.per_minute)
        yield f"x-ratelimit-remaining-{unit}", str(max(0, int(self.left(now_s) + ROUNDING)))
        yield f"x-ratelimit-reset-{unit}", f"{self.wait_s(self.per_minute, now_s):.3f}s"


class KeyUsage:
    """What one key uses of its limits. Each method is O(1)."""

    def __init__(self, name: str, limits: KeyLimits, now_s: float):
        self._name, self.limits = name, limits
        self.running = 0
        per_minute = (limits.requests_per_minute, limits.tokens_per_minute)
        self.requests, self.tokens = (Bucket(n, now_s) if n else None for n in per_minute)

    def find_refusal(self, tokens: int, now_s: float) -> KeyLimitReached | None:
        """The refusal of a request that may need so many tokens; None if it is within the limits.
        One that may need more than the limit needs a full bucket."""
        most = self.limits.concurrent_requests
        if most is not None and self.running >= most:
            fault = f"runs {self.running} of at most {most} requests at a time"
            return self._refuse(RefusalReason.KEY_CONCURRENCY, fault, 0.0, now_s)
        if self.requests and (wait_s := self.requests.wait_s(1, now_s)):
            fault = f"has used its limit of {self.requests.per_minute} requests a minute"
            return self._refuse(RefusalReason.KEY_REQUESTS, fault, wait_s, now_s)
        if self.tokens and (wait_s := self.tokens.wait_s(tokens, now_s)):
            left = max(0, int(self.tokens.left(now_s)))
            fault = (
                f"has {left} tokens left of its limit of {self.tokens.per_minute} a minute, and "
                f"this request may need {tokens}"
            )
            return self._refuse(RefusalReason.KEY_TOKENS, fault, wait_s, now_s)
        return None

    def begin(self, tokens: int, now_s: float) -> None:
        """Takes a request and the tokens reserved for it."""
        self.running += 1
        if self.requests:
            self.requests.take(1, now_s)
        if self.tokens:
            self.tokens.take(tokens, now_s)

    def end(self, unused_tokens: int, now_s: float) -> None:
        """A request has ended; returns unused tokens, or takes those beyond the reserved ones."""
        self.running -= 1
        if self.tokens:
            self.tokens.take(-unused_tokens, now_s)

    def headers(self, now_s: float) -> Mapping[str, str]:
        """OpenAI's `x-ratelimit` headers of the limits that the key has."""
        buckets = {"requests": self.requests, "tokens": self.tokens}
        return {
            name: value
            for unit, bucket in buckets.items()
            if bucket
            for name, value in bucket.headers(unit, now_s)
        }

    def idle(self, now_s: float) -> bool:
        """Whether it is as if the key had never sent a request."""
        buckets = filter(None, (self.requests, self.tokens))
        return not self.running and all(
            not bucket.wait_s(bucket.per_minute, now_s) for bucket in buckets
        )

    def _refuse(
        self, reason: RefusalReason, fault: str, wait_s: float, now_s: float
    ) -> KeyLimitReached:
        return KeyLimitReached(reason, f"API key {self._name} {fault}", wait_s, self.headers(now_s))


@dataclass(slots=True)
class Grant:
    """An admitted request's part of its key's limits."""

    usage: KeyUsage
    reserved: int  # tokens
    settled: bool = False

    def settle(self, used: int, now_s: float) -> None:
        """The request has ended and used so many tokens. Further calls have no effect."""
        if not self.settled:
            self.settled = True
            self.usage.end(self.reserved - used, now_s)


class KeyLimiter:
    """The usage of every key that has limits: those of its name, else those of ALL_KEYS."""

    def __init__(self, limits: Mapping[str, KeyLimits]):
        self._limits = limits
        self._usage: dict[str, KeyUsage] = {}

    def check(self, key: str, tokens: int, now_s: float) -> None:
        """Raises KeyLimitReached if a request of the key, which may need so many tokens, is beyond
        its limits now. O(1)."""
        usage = self.find(key, now_s)
        if usage is not None and (refusal := usage.find_refusal(tokens, now_s)):
            raise refusal

    def check_class(self, key: str, sla_class: str) -> None:
        """Raises InvalidArgument if the key may not use the SLA class."""
        limits = self._limits_of(key)
        if limits is not None and limits.sla_classes and sla_class not in limits.sla_classes:
            allowed = ", ".join(limits.sla_classes)
            raise InvalidArgument(
                "sla_class",
                f"API key {key} may not use {sla_class!r}; name one that it may use: {allowed}",
            )

    def reserve(self, key: str, tokens: int, now_s: float) -> Grant | None:
        """Begins a request that `check` has admitted; None if the key has no limits."""
        usage = self.find(key, now_s)
        if usage is None:
            return None
        if usage.tokens:
            tokens = min(tokens, usage.tokens.per_minute)
        usage.begin(tokens, now_s)
        return Grant(usage, tokens)

    def find(self, key: str, now_s: float) -> KeyUsage | None:
        """The usage of a key; None if it has no limits. O(1)."""
        limits = self._limits_of(key)
        if limits is None:
            return None
        if key not in self._usage:
            if len(self._usage) >= MAX_KEYS:
                kept = {name: used for name, used in self._usage.items() if not used.idle(now_s)}
                self._usage = kept
            self._usage[key] = KeyUsage(key, limits, now_s)
        return self._usage[key]

    def _limits_of(self, key: str) -> KeyLimits | None:
        return (self._limits.get(key) or self._limits.get(ALL_KEYS)) if key else None
