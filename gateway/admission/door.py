"""Who is refused before anything of the request is read: O(1), and each with a time. Pure."""

from dataclasses import dataclass
from enum import StrEnum

from gateway.peers.fleet import Fleet
from gateway.peers.messages import MIN_RETRY_S
from services.runtime.errors import Code, ServiceError


class Bar(StrEnum):
    """What stood in the way."""

    SESSIONS = "sessions"
    QUEUE = "queue"
    DEADLINE = "deadline"
    ARRIVING = "arriving"
    READING = "reading"


class Refused(ServiceError):
    """Too much is going on for one more request."""

    def __init__(self, bar: Bar, message: str, retry_after_s: float):
        retry_after_s = max(MIN_RETRY_S, retry_after_s)
        super().__init__(Code.RESOURCE_EXHAUSTED, f"{message}; retry later", retry_after_s)
        self.bar = bar


@dataclass(frozen=True, slots=True)
class Door:
    """The bounds on what is taken in."""

    max_sessions: int
    max_queued: int

    def refusal(
        self, live: int, wanted: int, timeout_s: float, fleet: Fleet, now_s: float
    ) -> Refused | None:
        """Why `wanted` more choices beside `live` ones, to be answered within `timeout_s`, are
        not taken; None when they are."""
        drain_s, timeout_s = fleet.drain_left_s(now_s), max(0.0, timeout_s)
        if live + wanted > self.max_sessions:
            return Refused(Bar.SESSIONS, f"all {self.max_sessions} places are taken", drain_s)
        if drain_s > 0 and fleet.queued >= self.max_queued:
            return Refused(Bar.QUEUE, f"{fleet.queued} requests wait already", drain_s)
        if fleet.backed_up and drain_s > timeout_s:
            return Refused(
                Bar.DEADLINE,
                f"{fleet.queued} requests wait, about {drain_s:.1f} s of work, and this one may "
                f"take {timeout_s:.1f} s",
                drain_s - timeout_s,
            )
        return None
