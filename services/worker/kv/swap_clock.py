"""SwapTimer: what moves cost, read from the events around their parts."""

from collections import deque
from dataclasses import dataclass, field

from services.costs import Direction, SwapTiming
from services.worker.kv.device_streams import Event, Lane, Streams

MAX_PENDING = 1024  # moves not read yet; nobody asks for them when more are, so the oldest goes


@dataclass(frozen=True, slots=True)
class TransferTimer:
    """One move's parts, each between two events of one lane: what it waited for in between is
    no cost of its own, and the parts are what another move has to wait for."""

    direction: Direction
    tokens: int
    request_id: str
    spans: list[tuple[Lane, Event, Event]] = field(default_factory=list)

    def add(self, lane: Lane, start: Event, end: Event) -> None:
        self.spans.append((lane, start, end))


class SwapTimer:
    """Moves whose parts are all issued, until their last one is over. O(parts) a move."""

    def __init__(self, streams: Streams):
        self._streams = streams
        self._pending: deque[TransferTimer] = deque(maxlen=MAX_PENDING)

    def follow(self, watch: TransferTimer) -> None:
        """Its last part was issued. Moves of nothing tell nothing."""
        if watch.tokens:
            self._pending.append(watch)

    def take(self) -> list[SwapTiming]:
        """Those over since the last call, without waiting for the others."""
        over: list[TransferTimer] = []
        pending = list(self._pending)
        self._pending.clear()
        for watch in pending:
            (over if watch.spans[-1][2].query() else self._pending).append(watch)
        return [self._timing(watch) for watch in over]

    def _timing(self, watch: TransferTimer) -> SwapTiming:
        parts = [(lane, self._streams.elapsed_s(start, end)) for lane, start, end in watch.spans]
        compute_s = sum(seconds for lane, seconds in parts if lane is Lane.COMPUTE)
        elapsed_s = sum(seconds for _, seconds in parts)
        return SwapTiming(watch.direction, watch.tokens, elapsed_s, compute_s, watch.request_id)
