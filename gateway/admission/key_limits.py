"""Limits of API keys: tokens are reserved at admission, by the forecast once it is known, and
settled at the end. Pure.

A limit per minute is a token bucket (Turner, New directions in communications, 1986) that holds the
amount of a minute and refills evenly.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
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
        self.set(self.left(now_s) - amount, now_s)

    def set(self, left: float, now_s: float) -> None:
        """Sets what is left."""
        self._left = min(self.per_minute, left)
        self._since_s = max(self._since_s, now_s)

    def resize(self, per_minute: int, now_s: float) -> None:
        """Holds another amount, of which the same part is left."""
        part = self.left(now_s) / self.per_minute
        self.per_minute = per_minute
        self.set(part * per_minute, now_s)

    def wait_s(self, amount: float, now_s: float) -> float:
        """Seconds until so much is left, at most a full bucket; 0 if it is."""
        lacking = min(amount, self.per_minute) - self.left(now_s)
        return lacking * MINUTE_S / self.per_minute if lacking > ROUNDING else 0.0

    def headers(self, unit: str, now_s: float) -> Iterator[tuple[str, str]]:
        """OpenAI's headers; `reset`: until the bucket is full."""
        yield f"x-ratelimit-limit-{unit}", str(self.per_minute)
        yield f"x-ratelimit-remaining-{unit}", str(max(0, int(self.left(now_s) + ROUNDING)))
        yield f"x-ratelimit-reset-{unit}", f"{self.wait_s(self.per_minute, now_s):.3f}s"


@dataclass(frozen=True, slots=True)
class Change:
    """What an event takes of a key's limits, in their order; negative: what it returns."""

    requests: int = 0
    tokens: int = 0  # of those a minute
    running: int = 0  # requests
    queued: int = 0  # tokens

    def __neg__(self) -> "Change":
        return Change(-self.requests, -self.tokens, -self.running, -self.queued)


Report = Callable[["KeyUsage", Change], None]


class KeyUsage:
    """What one key uses of its limits. Each method is O(1)."""

    def __init__(self, name: str, limits: KeyLimits, parts: int, report: Report, now_s: float):
        """`limits` are those of all gateways. `report` is called with each change."""
        self.name, self.whole, self.limits = name, limits, limits.share(parts)
        self._report = report
        self.running = self.queued_tokens = 0
        per_minute = (self.limits.requests_per_minute, self.limits.tokens_per_minute)
        self.requests, self.tokens = (Bucket(n, now_s) if n else None for n in per_minute)

    def find_refusal(
        self, tokens: int, now_s: float, drain_s: float = 0.0
    ) -> KeyLimitReached | None:
        """The refusal of a request that may need so many tokens; None if it is within the limits.
        One that may need more than a limit needs a full bucket, or an empty queue."""
        reason = self._find_reason(tokens, now_s)
        return self.refuse(reason, tokens, now_s, drain_s) if reason else None

    def refuse(
        self, reason: RefusalReason, tokens: int, now_s: float, drain_s: float
    ) -> KeyLimitReached:
        """The refusal by one of the limits. `drain_s`: until the queue is empty."""
        fault, wait_s = FAULTS[reason](self, tokens, now_s, drain_s)
        return KeyLimitReached(reason, f"API key {self.name} {fault}", wait_s, self.headers(now_s))

    def change(self, change: Change, now_s: float) -> None:
        """Applies and reports a change."""
        self.apply(change, now_s)
        self._report(self, change)

    def apply(self, change: Change, now_s: float) -> None:
        """Applies a change without reporting it."""
        self.running += change.running
        self.queued_tokens += change.queued
        if self.requests:
            self.requests.take(change.requests, now_s)
        if self.tokens:
            self.tokens.take(change.tokens, now_s)

    def set_left(self, requests: float, tokens: float, now_s: float) -> None:
        """Sets what is left of the limits a minute."""
        if self.requests:
            self.requests.set(requests, now_s)
        if self.tokens:
            self.tokens.set(tokens, now_s)

    def divide(self, parts: int, now_s: float) -> None:
        """Keeps to one of so many parts of the limits, and of what is left of them."""
        self.limits = limits = self.whole.share(parts)
        if self.requests and limits.requests_per_minute:
            self.requests.resize(limits.requests_per_minute, now_s)
        if self.tokens and limits.tokens_per_minute:
            self.tokens.resize(limits.tokens_per_minute, now_s)

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

    def _find_reason(self, tokens: int, now_s: float) -> RefusalReason | None:
        running, queued = self.limits.concurrent_requests, self.limits.queued_tokens
        if running is not None and self.running >= running:
            return RefusalReason.KEY_CONCURRENCY
        if queued is not None and self.queued_tokens and self.queued_tokens + tokens > queued:
            return RefusalReason.KEY_QUEUE
        if self.requests and self.requests.wait_s(1, now_s):
            return RefusalReason.KEY_REQUESTS
        if self.tokens and self.tokens.wait_s(tokens, now_s):
            return RefusalReason.KEY_TOKENS
        return None


# The sentence of a refusal, and the seconds until such a request is within the limit.
Fault = tuple[str, float]


def _too_many_run(usage: KeyUsage, tokens: int, now_s: float, drain_s: float) -> Fault:
    return f"runs its limit of {usage.limits.concurrent_requests} requests at a time", 0.0


def _too_many_wait(usage: KeyUsage, tokens: int, now_s: float, drain_s: float) -> Fault:
    return f"would have more than its limit of {usage.limits.queued_tokens} queued tokens", drain_s


def _no_request_left(usage: KeyUsage, tokens: int, now_s: float, drain_s: float) -> Fault:
    wait_s = usage.requests.wait_s(1, now_s) if usage.requests else 0.0
    return f"has used its limit of {usage.limits.requests_per_minute} requests a minute", wait_s


def _too_few_tokens_left(usage: KeyUsage, tokens: int, now_s: float, drain_s: float) -> Fault:
    left = max(0, int(usage.tokens.left(now_s))) if usage.tokens else 0
    wait_s = usage.tokens.wait_s(tokens, now_s) if usage.tokens else 0.0
    limit = usage.limits.tokens_per_minute
    fault = f"has {left} tokens left of its limit of {limit} a minute, and this request may need"
    return f"{fault} {tokens}", wait_s


FAULTS: Mapping[RefusalReason, Callable[[KeyUsage, int, float, float], Fault]] = {
    RefusalReason.KEY_CONCURRENCY: _too_many_run,
    RefusalReason.KEY_QUEUE: _too_many_wait,
    RefusalReason.KEY_REQUESTS: _no_request_left,
    RefusalReason.KEY_TOKENS: _too_few_tokens_left,
}


@dataclass(slots=True)
class Grant:
    """An admitted request's part of its key's limits."""

    usage: KeyUsage
    needed: list[int]  # tokens of each choice
    queued: list[int]  # those of each choice that has had no worker, else 0
    total: int  # of the tokens needed
    most: int  # tokens that a full bucket holds; without tokens_per_minute it has no effect
    settled: bool = False

    @property
    def reserved(self) -> int:
        """Tokens that are taken of those a minute."""
        return min(self.total, self.most)

    @property
    def taken(self) -> Change:
        """What the request has taken and not returned."""
        return Change(1, self.reserved, 1, sum(self.queued))

    @property
    def counts_tokens(self) -> bool:
        """Whether the key has a limit of tokens."""
        limits = self.usage.whole
        return bool(limits.tokens_per_minute or limits.queued_tokens)

    def expect(self, choice: int, tokens: int, now_s: float) -> None:
        """Reserves so many tokens for a choice in place of those before, even beyond the limits.
        No effect on a settled request. O(1)."""
        if self.settled:
            return
        before, more = self.reserved, tokens - self.needed[choice]
        self.needed[choice] = tokens
        self.total += more
        queued = more if self.queued[choice] else 0
        self.queued[choice] += queued
        change = Change(tokens=self.reserved - before, queued=queued)
        if change.tokens or change.queued:
            self.usage.change(change, now_s)

    def start(self, choice: int, now_s: float) -> None:
        """A choice is placed at its first worker. Further calls have no effect."""
        if self.queued[choice] and not self.settled:
            self.usage.change(Change(queued=-self.queued[choice]), now_s)
            self.queued[choice] = 0

    def settle(self, used: int, now_s: float) -> None:
        """The request has ended and used so many tokens. Further calls have no effect."""
        if not self.settled:
            self.settled = True
            unused = self.reserved - used
            self.usage.change(-Change(0, unused, 1, sum(self.queued)), now_s)

    def cancel(self, now_s: float) -> None:
        """The request is not opened."""
        if not self.settled:
            self.settled = True
            self.usage.change(-self.taken, now_s)


class KeyLimiter:
    """The usage of every key that has limits: those of its name, else those of ALL_KEYS."""

    def __init__(self, limits: Mapping[str, KeyLimits], parts: int = 1):
        """`parts`: gateways that divide the limits."""
        self._limits, self._parts = limits, parts
        self._usage: dict[str, KeyUsage] = {}
        self.report: Report = lambda *_: None  # called with each change

    def check(self, key: str, tokens: int, now_s: float, drain_s: float = 0.0) -> None:
        """Raises KeyLimitReached if a request of the key, which may need so many tokens, is beyond
        its limits now. `drain_s`: until the queue is empty. O(1)."""
        usage = self.find(key, now_s)
        if usage is not None and (refusal := usage.find_refusal(tokens, now_s, drain_s)):
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

    def weight(self, key: str) -> float:
        """The key's weight against other tenants; 0 if it has none."""
        limits = self._limits_of(key)
        return (limits.weight or 0.0) if limits is not None else 0.0

    def reserve(
        self, key: str, tokens: Sequence[int], now_s: float, drain_s: float = 0.0
    ) -> Grant | None:
        """Begins a request that may need so many tokens for each choice; None if the key has no
        limits. Raises KeyLimitReached. O(choices)."""
        self.check(key, sum(tokens), now_s, drain_s)
        usage = self.find(key, now_s)
        if usage is None:
            return None
        grant = make_grant(usage, tokens)
        usage.change(grant.taken, now_s)
        return grant

    def divide(self, parts: int, now_s: float) -> None:
        """Keeps to one of so many parts of the limits. O(keys)."""
        self._parts = parts
        for usage in self._usage.values():
            usage.divide(parts, now_s)

    def find(self, key: str, now_s: float) -> KeyUsage | None:
        """The usage of a key; None if it has no limits. O(1)."""
        limits = self._limits_of(key)
        if limits is None:
            return None
        if key not in self._usage:
            if len(self._usage) >= MAX_KEYS:
                kept = {name: used for name, used in self._usage.items() if not used.idle(now_s)}
                self._usage = kept
            self._usage[key] = KeyUsage(key, limits, self._parts, self._forward, now_s)
        return self._usage[key]

    def running(self) -> Sequence[KeyUsage]:
        """The usage of keys with a request. O(keys)."""
        return [usage for usage in self._usage.values() if usage.running]

    def _forward(self, usage: KeyUsage, change: Change) -> None:
        self.report(usage, change)

    def _limits_of(self, key: str) -> KeyLimits | None:
        return (self._limits.get(key) or self._limits.get(ALL_KEYS)) if key else None


def make_grant(usage: KeyUsage, tokens: Sequence[int]) -> Grant:
    """The grant of a request that may need so many tokens for each choice."""
    queued = list(tokens) if usage.limits.queued_tokens else [0] * len(tokens)
    needed = sum(tokens)
    return Grant(usage, list(tokens), queued, needed, usage.limits.tokens_per_minute or needed)
