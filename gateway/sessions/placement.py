"""Where a live choice stands with scheduler and workers, and which of its tokens are due. Pure."""

from dataclasses import dataclass
from enum import StrEnum

from services.core import FinishReason

MAX_TURN_S = 0.5  # of a wait: what one look at it counts for at most


class Cause(StrEnum):
    """Why a request is submitted again."""

    SCHEDULER = "scheduler"  # lost, before the request was placed or with its worker
    WORKER = "worker"  # its stream broke behind the prompt
    GAP = "gap"  # tokens before those that came are missing
    LATE = "late"  # those that are due never came

    @property
    def confirmed(self) -> bool:
        """Whether a part was seen to be lost, rather than taken for lost."""
        return self in (Cause.SCHEDULER, Cause.WORKER)


@dataclass(slots=True)
class Due:
    """An end that the scheduler has told of, while its tokens are still on their way.

    Only time in which somebody listened counts as waiting: an event loop that was busy for five
    seconds has not seen that nothing came.
    """

    tokens: int  # of output, in all
    reason: FinishReason
    waited_s: float = 0.0
    quiet_s: float = 0.0  # of it at the end, with nothing from that worker for anybody

    def listen(self, turn_s: float, heard: bool) -> None:
        """`turn_s` more have passed; `heard`: its worker's stream brought something."""
        turn_s = min(turn_s, MAX_TURN_S)
        self.waited_s += turn_s
        self.quiet_s = 0.0 if heard else self.quiet_s + turn_s


@dataclass(slots=True)
class Placement:
    """One submission of a choice. Owned by the pipeline."""

    wire_id: str = ""  # empty: not submitted
    attempts: int = 0  # submissions of the choice so far, this one included
    had_tokens: int = 0  # output tokens when it was submitted
    worker_id: str = ""  # that it was last placed on
    address: str = ""  # of that worker
    prompted: bool = False  # whether its prompt went out to it
    running: bool = False
    announced: bool = False  # to a scheduler that has not said yet what it makes of it
    due: Due | None = None
