"""Events of a run and their total order: time, kind, actor, sequence."""

from dataclasses import dataclass
from heapq import heappop, heappush

from services.core import Plan
from services.scheduler.core import events as ev
from services.worker.requests.types.prompt import Prompt


@dataclass(frozen=True, slots=True)
class UploadEnd:
    """KV is back on the device."""

    serial: int


Command = Plan | Prompt | UploadEnd


@dataclass(frozen=True, slots=True)
class ToWorker:
    """A command reaches a worker."""

    worker: int
    command: Command


@dataclass(frozen=True, slots=True)
class SpanEnd:
    """A worker's steps are computed. Obsolete unless the worker's span has this number."""

    worker: int
    number: int


@dataclass(frozen=True, slots=True)
class ToScheduler:
    """A message reaches the scheduler from this worker, or from a peer (-1)."""

    event: ev.Event
    worker: int = -1


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request of the workload reaches the scheduler."""

    row: int


@dataclass(frozen=True, slots=True)
class Refresh:
    """Shared forecasts are renewed."""


@dataclass(frozen=True, slots=True)
class Wake:
    """The scheduler's timer or its next round is due."""


Event = ToWorker | SpanEnd | ToScheduler | Arrival | Refresh | Wake

# At equal times. A command that arrives at the end of a step takes effect before the next one; a
# round includes all messages of its time.
ORDER: dict[type[Event], int] = {
    kind: place
    for place, kind in enumerate((ToWorker, SpanEnd, ToScheduler, Arrival, Refresh, Wake))
}


class EventQueue:
    """A heap of events. Equal runs pop equal events in the same order."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int, int, Event]] = []
        self._sequence = 0

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, time_s: float, event: Event) -> None:
        actor = event.worker if isinstance(event, ToWorker | SpanEnd | ToScheduler) else 0
        self._sequence += 1
        heappush(self._heap, (time_s, ORDER[type(event)], actor, self._sequence, event))

    def pop(self) -> tuple[float, Event]:
        """The next event and its time in seconds. Raises IndexError when there is none."""
        time_s, _, _, _, event = heappop(self._heap)
        return time_s, event
