"""Admission before anything of a request is read: O(1), and each refusal has a retry time. Pure."""

from dataclasses import dataclass

from gateway.peers.fleet import Fleet
from gateway.types.errors import RefusalReason, RequestRefused


@dataclass(frozen=True, slots=True)
class AdmissionControl:
    """The limits on live choices and on the scheduler's queue."""

    max_sessions: int
    max_queued: int

    def find_refusal(
        self, live: int, wanted: int, timeout_s: float, fleet: Fleet, now_s: float
    ) -> RequestRefused | None:
        """The refusal of `wanted` choices beyond `live` ones, due within `timeout_s`; None if they
        are admitted."""
        drain_s, timeout_s = fleet.drain_left_s(now_s), max(0.0, timeout_s)
        if live + wanted > self.max_sessions:
            message = f"all {self.max_sessions} sessions are in use"
            return RequestRefused(RefusalReason.SESSIONS, message, drain_s)
        if drain_s > 0 and fleet.queued >= self.max_queued:
            message = f"{fleet.queued} requests wait already"
            return RequestRefused(RefusalReason.QUEUE, message, drain_s)
        if fleet.backed_up and drain_s > timeout_s:
            return RequestRefused(
                RefusalReason.DEADLINE,
                f"{fleet.queued} requests wait, about {drain_s:.1f} s of work, and this one may "
                f"take {timeout_s:.1f} s",
                drain_s - timeout_s,
            )
        return None
