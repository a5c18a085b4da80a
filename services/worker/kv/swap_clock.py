"""SwapClock: device time of KV transfers, measured by events around their parts."""

from collections import deque
from dataclasses import dataclass, field

from services.costs import Direction, SwapTiming
from services.worker.kv.device_streams import Event, Lane, Streams

MAX_PENDING = 1024  # unread transfers; the oldest are dropped beyond this


@dataclass(frozen=True, slots=True)
class TransferTimer:
    """Parts of one transfer, each between two events of one lane. Waits between the parts do not
    count as cost."""

    direction: Direction
    tokens: int
    request_id: str
    spans: list[tuple[Lane, Event, Event]] = field(default_factory=list)

    def add(self, lane: Lane, start: Event, end: Event) -> None:
        self.spans.append((lane, start, end))


class SwapClock:
    """Issued transfers with a last part that has not completed. O(parts) per transfer."""

    def __init__(self, streams: Streams):
        self._streams = streams
        self._pending: deque[TransferTimer] = deque(maxlen=MAX_PENDING)

    def add(self, timer: TransferTimer) -> None:
        """Adds a fully issued transfer. Empty transfers have no timing."""
        if timer.tokens:
            self._pending.append(timer)

    def pop_finished(self) -> list[SwapTiming]:
        """Returns the transfers completed since the last call; does not wait for the others."""
        finished: list[TransferTimer] = []
        pending = list(self._pending)
        self._pending.clear()
        for timer in pending:
            (finished if timer.spans[-1][2].query() else self._pending).append(timer)
        return [self._timing(timer) for timer in finished]

    def _timing(self, timer: TransferTimer) -> SwapTiming:
        parts = [(lane, self._streams.elapsed_s(start, end)) for lane, start, end in timer.spans]
        compute_s = sum(seconds for lane, seconds in parts if lane is Lane.COMPUTE)
        elapsed_s = sum(seconds for _, seconds in parts)
        return SwapTiming(timer.direction, timer.tokens, elapsed_s, compute_s, timer.request_id)
