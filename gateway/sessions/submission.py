"""One submission of a choice to the scheduler, and its worker as far as known. Pure."""

from dataclasses import dataclass

from services.core import FinishReason
from services.runtime.errors import ServiceError

MAX_TURN_S = 0.5  # the most that one sweep adds to a wait


@dataclass(slots=True)
class PendingEnd:
    """An end that the scheduler has reported while its tokens, or the worker's reason for a
    failure, are still on their way. `failure` is the reason if the worker gives none.

    Only time in which the gateway could receive counts as waiting: an event loop that was blocked
    for five seconds has not observed that nothing arrived.
    """

    tokens: int  # output tokens in total
    reason: FinishReason
    failure: ServiceError | None = None
    waited_s: float = 0.0
    quiet_s: float = 0.0  # the last part of it, without any message from the worker

    def wait(self, turn_s: float, worker_active: bool) -> None:
        """Adds `turn_s`; `worker_active`: the worker's stream delivered something meanwhile."""
        turn_s = min(turn_s, MAX_TURN_S)
        self.waited_s += turn_s
        self.quiet_s = 0.0 if worker_active else self.quiet_s + turn_s


@dataclass(slots=True)
class Submission:
    """One submission of a choice. Each has a different id, so that late messages about an earlier
    one are recognized and dropped."""

    wire_id: str = ""  # empty: not submitted
    attempts: int = 0  # submissions of the choice so far, including this one
    had_tokens: int = 0  # output tokens at submission
    worker_id: str = ""  # where it was last placed
    address: str = ""  # of that worker
    prompted: bool = False  # the prompt was sent to that worker
    running: bool = False
    announced: bool = False  # to a scheduler that has not yet answered
    pending_end: PendingEnd | None = None
