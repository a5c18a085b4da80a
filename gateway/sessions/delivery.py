"""Delivery: when a client took what it was sent of one choice, beside when it came, and what became
of it. Pure."""

from collections import deque
from dataclasses import dataclass
from typing import Self

from services.core import FinishReason, Sla
from services.sla import RequestTimeline, SlaMissCause, judge_sla


@dataclass(frozen=True, slots=True)
class Ended:
    """A choice of which its client has all that it will ever have, judged once: whoever counts or
    tells of it afterwards tells the same."""

    sla: Sla
    line: RequestTimeline
    reason: FinishReason
    cause: SlaMissCause  # NONE where its SLA was kept

    @classmethod
    def judged(cls, sla: Sla, line: RequestTimeline, reason: FinishReason) -> Self:
        return cls(sla, line, reason, judge_sla(sla, line, reason))


class Delivery:
    """The timeline as the client's socket has it.

    A request is away between two tokens, wherever their client is by then: the gap before the
    message that brings the later one is what its client saw of it.
    """

    __slots__ = ("_back", "line")

    def __init__(self, arrival_s: float):
        self.line = RequestTimeline(arrival_s)
        self._back: deque[tuple[int, float]] = deque()

    def on_back(self, at: int, swap_in_s: float) -> None:
        """Token `at` has come, the first since the request was away; so much of the wait for it
        went to its KV's way back from host memory."""
        self._back.append((at, swap_in_s))

    def on_sent(self, tokens: int, now_s: float) -> None:
        """The client has taken the next tokens, at least one."""
        line = self.line
        end, swap_in_s = line.tokens + tokens, 0.0
        while self._back and self._back[0][0] < end:
            line.on_preempted()
            swap_in_s += self._back.popleft()[1]
        if swap_in_s:
            line.on_resumed(True, now_s - swap_in_s)
        line.on_tokens(tokens, now_s)

    def of(self, came: RequestTimeline) -> RequestTimeline:
        """The whole timeline: with what only that of the tokens as they came can tell."""
        line = self.line
        line.placed_s, line.rejected = came.placed_s, came.rejected
        line.away, line.swap_in_since_s = came.away, came.swap_in_since_s
        return line


def unsent(reason: FinishReason | None, broken: FinishReason | None) -> FinishReason:
    """Why a choice is over whose client was not given its end, of a call that `broken` has ended;
    None: its client has left."""
    if reason in (FinishReason.ERROR, FinishReason.DEADLINE):
        return reason
    return broken or FinishReason.CANCELLED
