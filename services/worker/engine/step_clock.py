"""StepClock: how long steps took their device, read from the events around them.

A host that only launches a step is done long before the device: a prefill that draws nothing would
look like nothing. So the time is between two events on the compute lane, and is told once the later
one is seen to have passed. On a CPU that is at once.
"""

from collections import deque
from dataclasses import dataclass

from services.costs import StepTiming
from services.worker.kv.device_streams import Event, Lane, Streams
from services.worker.requests.batch import StepBatch

MAX_PENDING = 1_024  # steps not read yet; nobody asks for them when more are, so the oldest goes


@dataclass(frozen=True, slots=True)
class StepWatch:
    """A step under way: what ran, as its batch was, which is moved on when it is over."""

    prefill_tokens: int
    decode_seqs: int
    context_tokens: int
    start: Event


class StepClock:
    """Steps from `begin` to `end`, until they are over. O(1) a step; it waits for nothing."""

    def __init__(self, streams: Streams):
        self._streams = streams
        self._pending: deque[tuple[StepWatch, Event]] = deque(maxlen=MAX_PENDING)

    def begin(self, batch: StepBatch) -> StepWatch:
        """Nothing of it was issued yet. One that breaks is not ended."""
        return StepWatch(
            batch.prefill_tokens,
            len(batch.decodes),
            batch.context_tokens,
            self._streams.record(Lane.COMPUTE),
        )

    def end(self, watch: StepWatch) -> None:
        """All of it was issued."""
        self._pending.append((watch, self._streams.record(Lane.COMPUTE)))

    def take(self) -> list[StepTiming]:
        """Those over since the last call, in their order, without waiting for the others."""
        timings = []
        while self._pending and self._pending[0][1].query():
            watch, end = self._pending.popleft()
            elapsed_s = self._streams.elapsed_s(watch.start, end)
            timings.append(
                StepTiming(watch.prefill_tokens, watch.decode_seqs, watch.context_tokens, elapsed_s)
            )
        return timings
