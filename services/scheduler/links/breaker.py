"""Whether a service that does not answer is asked, and waited for: a circuit breaker.

closed ── so many failures in a row ──▶ open ── after a pause ──▶ half open ── answer ──▶ closed
                                          ▲                          │
                                          └── failure: twice as long ┘
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from services.runtime.backoff import Backoff


class BreakerPhase(StrEnum):
    CLOSED = "closed"  # asked and waited for
    OPEN = "open"  # not asked
    HALF_OPEN = "half_open"  # asked once, to see; nobody waits for it


@dataclass(frozen=True, slots=True)
class Breaker:
    """What is known of the service. Each thing that happens gives the next breaker.

    Whoever asks says `asked` first, then `answered` or `failed`; and `late` when
    what had failed by its deadline answers after all.
    """

    failures_max: int
    pauses: Backoff
    phase: BreakerPhase = BreakerPhase.CLOSED
    failures: int = 0  # in a row
    openings: int = 0  # in a row
    until_s: float = 0.0  # of the pause, while open

    def wait_s(self, now: float) -> float:
        """Until the service may be asked; 0 when it may be now."""
        return max(0.0, self.until_s - now) if self.phase is BreakerPhase.OPEN else 0.0

    def asked(self) -> "Breaker":
        return (
            replace(self, phase=BreakerPhase.HALF_OPEN) if self.phase is BreakerPhase.OPEN else self
        )

    def answered(self) -> "Breaker":
        return Breaker(self.failures_max, self.pauses)

    def failed(self, now: float) -> "Breaker":
        """No answer, or none by the deadline."""
        failed = replace(self, failures=self.failures + 1)
        if self.phase is BreakerPhase.CLOSED and failed.failures < self.failures_max:
            return failed
        until_s = now + self.pauses.after_s(self.openings)
        return replace(failed, phase=BreakerPhase.OPEN, openings=self.openings + 1, until_s=until_s)

    def late(self, now: float) -> "Breaker":
        """It lives, but is too slow to be waited for: the next pause is a first one again."""
        if self.phase is BreakerPhase.CLOSED:
            return self
        until_s = min(self.until_s, now + self.pauses.first_s)
        return replace(self, phase=BreakerPhase.OPEN, openings=1, until_s=until_s)
