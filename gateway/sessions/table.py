"""All live choices, by the ids that the scheduler and the workers use."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field

from gateway.peers.fleet import Fleet
from gateway.sessions.call import LiveChoice
from gateway.sessions.submission import Submission
from services.core import FinishReason


@dataclass(slots=True)
class PeerState:
    """The state of the gateway's streams, shared by all handlers of the session table."""

    model: str  # of all requests; workers of other models are not in their fleet
    fleet: Fleet = field(default_factory=Fleet)
    scheduler_connected: bool = False  # the scheduler accepts requests now
    open_streams: set[str] = field(default_factory=set)  # addresses of workers with an open stream
    active_streams: set[str] = field(default_factory=set)  # that delivered since the last sweep

    def holds(self, submission: Submission) -> bool:
        """Whether tokens arrive, or will, on the stream on which the prompt was sent."""
        return submission.prompted and submission.address in self.open_streams


class SessionTable:
    """Each live choice exactly once: either submitted under an id, or waiting for submission."""

    def __init__(self) -> None:
        self._submitted: dict[str, LiveChoice] = {}
        self._waiting: dict[int, LiveChoice] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._submitted) + len(self._waiting)

    def __iter__(self) -> Iterator[LiveChoice]:
        """Iterates over a copy, so that choices may be added and removed meanwhile."""
        return iter([*self._submitted.values(), *self._waiting.values()])

    async def wait_until_empty(self) -> None:
        await self._idle.wait()

    def get(self, wire_id: str) -> LiveChoice | None:
        return self._submitted.get(wire_id)

    def submitted(self) -> list[LiveChoice]:
        return list(self._submitted.values())

    def waiting(self) -> list[LiveChoice]:
        return list(self._waiting.values())

    def placed_at(self, address: str) -> list[LiveChoice]:
        return [live for live in self._submitted.values() if live.submission.address == address]

    def worker_addresses(self) -> set[str]:
        """Addresses of workers that hold a choice."""
        return {live.submission.address for live in self._submitted.values()}

    def count_running(self) -> int:
        return sum(live.submission.running for live in self._submitted.values())

    def adapters(self, running: bool) -> set[str]:
        """Adapters of choices that run, or that wait. O(choices)."""
        choices = (live for live in self if live.submission.running == running)
        return {live.request.client.adapter for live in choices} - {""}

    def add(self, live: LiveChoice) -> None:
        """Adds a choice that waits for its first submission."""
        self._waiting[id(live)] = live
        self._idle.clear()

    def begin_submission(self, live: LiveChoice) -> None:
        """Gives a waiting choice a new submission id."""
        self._waiting.pop(id(live), None)
        earlier = live.submission.attempts
        wire_id = f"{live.call.request_id}-{live.session.index}" + f"~{earlier}" * (earlier > 0)
        live.submission = Submission(wire_id, earlier + 1, len(live.session.output))
        self._submitted[wire_id] = live

    def withdraw(self, live: LiveChoice) -> None:
        """Drops the current submission; the choice waits for the next one."""
        self._submitted.pop(live.submission.wire_id, None)
        earlier = live.submission
        live.submission = Submission("", earlier.attempts, earlier.had_tokens)
        self._waiting[id(live)] = live

    def end(
        self, live: LiveChoice, reason: FinishReason, now_s: float, failure: Exception | None = None
    ) -> None:
        """Ends a choice, removes it, and notifies its call."""
        live.session.end(reason, now_s, failure)
        self.remove(live)
        live.call.notify(live.session, now_s)

    def remove(self, live: LiveChoice) -> None:
        self._waiting.pop(id(live), None)
        self._submitted.pop(live.submission.wire_id, None)
        if not len(self):
            self._idle.set()
