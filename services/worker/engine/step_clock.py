"""StepClock: the time of steps on their device, measured by events.

The host finishes launching a step long before the device computes it, so that by the host's clock a
prefill that draws nothing would take no time. The time is therefore measured between two events on
the compute stream, and reported once the later one has passed. On a CPU that is immediate.
"""

from collections import deque
from dataclasses import dataclass

from services.costs import StepTiming
from services.worker.kv.device_streams import Event, Lane, Streams
from services.worker.requests.types.batch import StepBatch

MAX_PENDING = 1_024  # unread steps; the oldest is dropped when more accumulate


@dataclass(frozen=True, slots=True)
class StepTimer:
    """A step in progress. It copies the composition of its batch, because the batch advances at the
    end of the step."""

    prefill_tokens: int
    decode_seqs: int
    context_tokens: int
    start: Event


class StepClock:
    """Times steps from `begin` to `end`. O(1) per step, without waiting."""

    def __init__(self, streams: Streams):
        self._streams = streams
        self._pending: deque[tuple[StepTimer, Event]] = deque(maxlen=MAX_PENDING)

    def begin(self, batch: StepBatch) -> StepTimer:
        """Call before anything of the step is issued. A failed step has no end."""
        return StepTimer(
            batch.prefill_tokens,
            batch.decoding,
            batch.context_tokens,
            self._streams.record(Lane.COMPUTE),
        )

    def end(self, timer: StepTimer) -> None:
        """Call after everything of the step was issued."""
        self._pending.append((timer, self._streams.record(Lane.COMPUTE)))

    def pop_completed(self) -> list[StepTiming]:
        """Timings of steps completed since the last call, in order; does not wait for others."""
        timings = []
        while self._pending and self._pending[0][1].query():
            timer, end = self._pending.popleft()
            elapsed_s = self._streams.elapsed_s(timer.start, end)
            timings.append(
                StepTiming(timer.prefill_tokens, timer.decode_seqs, timer.context_tokens, elapsed_s)
            )
        return timings
