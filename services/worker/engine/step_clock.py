"""StepClock: how long steps took on their device, by the events around them.

A host that launches a step finishes long before the device: a prefill that draws nothing would seem
to take no time. The time is therefore measured between two events on the compute stream, and
reported once the later one has passed. On a CPU that is immediate.
"""

from collections import deque
from dataclasses import dataclass

from services.costs import StepTiming
from services.worker.kv.device_streams import Event, Lane, Streams
from services.worker.requests.types.batch import StepBatch

MAX_PENDING = 1_024  # unread steps; the oldest is dropped when more accumulate


@dataclass(frozen=True, slots=True)
class StepWatch:
    """A step in progress: a copy of its batch's composition, since the batch advances when it is
    over."""

    prefill_tokens: int
    decode_seqs: int
    context_tokens: int
    start: Event


class StepClock:
    """Times steps from `begin` to `end`. O(1) per step, without waiting."""

    def __init__(self, streams: Streams):
        self._streams = streams
        self._pending: deque[tuple[StepWatch, Event]] = deque(maxlen=MAX_PENDING)

    def begin(self, batch: StepBatch) -> StepWatch:
        """Call before anything of the step is issued. A failed step has no end."""
        return StepWatch(
            batch.prefill_tokens,
            len(batch.decodes),
            batch.context_tokens,
            self._streams.record(Lane.COMPUTE),
        )

    def end(self, watch: StepWatch) -> None:
        """Call after everything of the step was issued."""
        self._pending.append((watch, self._streams.record(Lane.COMPUTE)))

    def pop_completed(self) -> list[StepTiming]:
        """Steps completed since the last call, in order, without waiting for others."""
        timings = []
        while self._pending and self._pending[0][1].query():
            watch, end = self._pending.popleft()
            elapsed_s = self._streams.elapsed_s(watch.start, end)
            timings.append(
                StepTiming(watch.prefill_tokens, watch.decode_seqs, watch.context_tokens, elapsed_s)
            )
        return timings
