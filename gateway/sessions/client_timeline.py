"""When the client received the tokens of one choice, as distinct from when they were generated.
Pure."""

from collections import deque

from services.core import FinishReason
from services.sla import RequestTimeline


class ClientTimeline:
    """The timeline of one choice as its client's socket sees it.

    A preemption lies between two tokens. The client sees its delay in the gap before the message
    that carries the later token.
    """

    __slots__ = ("_resumptions", "timeline")

    def __init__(self, arrival_s: float):
        self.timeline = RequestTimeline(arrival_s)
        self._resumptions: deque[tuple[int, float]] = deque()

    def on_resumed(self, token: int, swap_in_s: float) -> None:
        """`token` is the first one generated after a preemption; `swap_in_s` of the wait for it
        was the transfer of its KV from host memory."""
        self._resumptions.append((token, swap_in_s))

    def on_sent(self, tokens: int, now_s: float) -> None:
        """The client has received the next tokens, at least one."""
        timeline = self.timeline
        end, swap_in_s = timeline.tokens + tokens, 0.0
        while self._resumptions and self._resumptions[0][0] < end:
            timeline.on_preempted()
            swap_in_s += self._resumptions.popleft()[1]
        if swap_in_s:
            timeline.on_resumed(True, now_s - swap_in_s)
        timeline.on_tokens(tokens, now_s)

    def complete(self, generated: RequestTimeline) -> RequestTimeline:
        """The timeline, completed with what only the timeline of generated tokens records."""
        timeline = self.timeline
        timeline.placed_s, timeline.rejected = generated.placed_s, generated.rejected
        timeline.away, timeline.swap_in_since_s = generated.away, generated.swap_in_since_s
        return timeline


def find_undelivered_reason(
    reason: FinishReason | None, broken: FinishReason | None
) -> FinishReason:
    """The finish reason of a choice with an undelivered end. `broken` is the reason that ended its
    call; None if the client disconnected."""
    if reason in (FinishReason.ERROR, FinishReason.DEADLINE):
        return reason
    return broken or FinishReason.CANCELLED
