"""A circuit breaker: whether a service that fails is still called, and waited for.

closed ── failures_max failures in a row ──▶ open ── pause ──▶ half open ── answer ──▶ closed
                                               ▲                   │
                                               └── failure: doubled pause ┘
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from services.runtime.network.backoff import Backoff


class BreakerPhase(StrEnum):
    CLOSED = "closed"  # called and waited for
    OPEN = "open"  # not called
    HALF_OPEN = "half_open"  # called once, as a probe; no request waits for it


@dataclass(frozen=True, slots=True)
class Breaker:
    """An immutable state; each event returns the next one.

    The caller reports `called` first, then `answered` or `failed`, and `late` for an answer after
    its deadline had counted as a failure.
    """

    failures_max: int
    pauses: Backoff
    phase: BreakerPhase = BreakerPhase.CLOSED
    failures: int = 0  # in a row
    openings: int = 0  # in a row
    until_s: float = 0.0  # end of the pause while open

    def wait_s(self, now: float) -> float:
        """Time until the service may be called; 0 if it may be called now."""
        return max(0.0, self.until_s - now) if self.phase is BreakerPhase.OPEN else 0.0

    def called(self) -> "Breaker":
        half_open = self.phase is BreakerPhase.OPEN
        return replace(self, phase=BreakerPhase.HALF_OPEN) if half_open else self

    def answered(self) -> "Breaker":
        return Breaker(self.failures_max, self.pauses)

    def failed(self, now: float) -> "Breaker":
        """An error, or no answer by the deadline."""
        failed = replace(self, failures=self.failures + 1)
        if self.phase is BreakerPhase.CLOSED and failed.failures < self.failures_max:
            return failed
        until_s = now + self.pauses.after_s(self.openings)
        openings = self.openings + 1
        return replace(failed, phase=BreakerPhase.OPEN, openings=openings, until_s=until_s)

    def late(self, now: float) -> "Breaker":
        """The service is up but too slow to be waited for: the next pause is a first one again."""
        if self.phase is BreakerPhase.CLOSED:
            return self
        until_s = min(self.until_s, now + self.pauses.first_s)
        return replace(self, phase=BreakerPhase.OPEN, openings=1, until_s=until_s)
