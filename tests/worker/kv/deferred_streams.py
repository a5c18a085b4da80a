"""DeferredStreams: a device that defers work as long as it may, so that a missing wait is detected.

Each operation records its predecessors: the operation before it in its lane, and the events for
which its lane waits. A seed decides which of the ready operations runs next, and when. Nothing runs
before a result is read or time passes. Copies of blocks go through `DeferredCopies`: like kernels
on a GPU, they are issued when called and run later.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from random import Random

from torch import Tensor

from services.worker.kv.cache import KVLayer
from services.worker.kv.copies import BlockCopies, StagedLayer
from services.worker.kv.device_streams import Event, Lane


class Missing(StrEnum):
    """The kinds of waits that a test can leave out."""

    GATHERED = "copy does not wait for the gather"
    COPIED_OUT = "the next gather does not wait for the slot's copy"
    SCATTERED = "copy does not wait for the slot's scatter"
    ARRIVED = "the scatter does not wait for the copy"
    ONE_COPY_LANE = "copies overtake each other"


# The wait that is left out: the waiting lane, and the lane of its event.
WAITS = {
    (Lane.COPY, "gather"): Missing.GATHERED,
    (Lane.COMPUTE, "copy"): Missing.COPIED_OUT,
    (Lane.COPY, "scatter"): Missing.SCATTERED,
}


@dataclass(eq=False)
class Operation:
    lane: Lane
    kind: str
    run: Callable[[], object]
    after: list["Operation"] = field(default_factory=list)
    done: bool = False
    number: int = 0  # in the order of completion

    @property
    def ready(self) -> bool:
        return all(operation.done for operation in self.after)


@dataclass(frozen=True)
class Marker:
    """An Event that passes when `operation` is done."""

    streams: "DeferredStreams"
    operation: Operation

    def query(self) -> bool:
        self.streams.pass_time()
        return self.operation.done or self.streams.missing is Missing.ARRIVED

    def synchronize(self) -> None:
        if self.streams.missing is not Missing.ARRIVED:
            self.streams.finish(self.operation)


class DeferredStreams:
    """Streams with a random interleaving; `missing` leaves out one kind of wait. `haste` are the
    probabilities that an operation of a lane runs when time passes: by default some seeds have a
    slow copy lane, some a slow compute lane, some both. At 0 only `finish` runs operations."""

    def __init__(
        self,
        chance: Random,
        missing: Missing | None = None,
        haste: tuple[float, ...] = (0.02, 0.3, 1.0),
    ):
        self.missing = missing
        self._chance = chance
        self._haste = {lane: chance.choice(haste) for lane in Lane}
        self._pending: dict[Lane, list[Operation]] = {lane: [] for lane in Lane}
        self._awaited: dict[Lane, list[Operation]] = {lane: [] for lane in Lane}
        self._kinds = dict.fromkeys(Lane, "")
        self._completed = 0

    # Streams

    def copy(self, into: Tensor, source: Tensor) -> None:
        assert into.is_contiguous() and source.is_contiguous() and into.shape == source.shape
        self.issue(Lane.COPY, "copy", lambda: into.copy_(source))

    def record(self, lane: Lane) -> Event:
        operation = Operation(lane, self._kinds[lane], lambda: None)
        operation.after = [*self._pending[lane], *self._awaited[lane]]
        self._pending[lane].append(operation)
        return Marker(self, operation)

    def wait(self, lane: Lane, event: Event) -> None:
        assert isinstance(event, Marker)
        kind = WAITS.get((lane, event.operation.kind))
        if kind is None or kind is not self.missing:
            self._awaited[lane].append(event.operation)

    def elapsed_s(self, start: Event, end: Event) -> float:
        assert isinstance(start, Marker) and isinstance(end, Marker)
        assert start.operation.lane is end.operation.lane
        assert start.operation.done and end.operation.done
        return float(end.operation.number - start.operation.number)

    # The device

    def issue(self, lane: Lane, kind: str, run: Callable[[], object]) -> None:
        before = [] if self._disordered(lane) else self._pending[lane][-1:]
        self._awaited[lane] = [o for o in self._awaited[lane] if not o.done]
        self._pending[lane].append(Operation(lane, kind, run, before + self._awaited[lane]))
        self._kinds[lane] = kind

    def _disordered(self, lane: Lane) -> bool:
        return lane is Lane.COPY and self.missing is Missing.ONE_COPY_LANE

    def pass_time(self) -> None:
        """Runs some of the ready operations, in random order."""
        lanes = list(Lane)
        self._chance.shuffle(lanes)
        for lane in lanes:
            while self._chance.random() < self._haste[lane] and self._run_one(lane):
                pass

    def _run_one(self, lane: Lane) -> bool:
        ready = [o for o in self._pending[lane] if o.ready]
        if ready:
            self._run(self._chance.choice(ready))
        return bool(ready)

    def finish(self, operation: Operation) -> None:
        """Runs an operation and its predecessors only."""
        ahead = [operation]
        while ahead:
            before = next((o for o in ahead[-1].after if not o.done), None)
            if before:
                ahead.append(before)
            elif not ahead[-1].done:
                self._run(ahead.pop())
            else:
                ahead.pop()

    def finish_all(self) -> None:
        """Runs everything that was issued."""
        for lane in Lane:
            while self._pending[lane]:
                self.finish(self._pending[lane][0])

    def _run(self, operation: Operation) -> None:
        assert operation.ready and not operation.done
        operation.run()
        operation.done = True
        self._completed += 1
        operation.number = self._completed
        self._pending[operation.lane].remove(operation)


class DeferredCopies:
    """BlockCopies that issue their work on the compute lane."""

    def __init__(self, copies: BlockCopies, streams: DeferredStreams):
        self._copies = copies
        self._streams = streams

    def gather(self, layer: KVLayer, blocks: Tensor, filled: Tensor, out: StagedLayer) -> None:
        self._issue("gather", lambda: self._copies.gather(layer, blocks, filled, out))

    def scatter(self, layer: KVLayer, blocks: Tensor, staged: StagedLayer) -> None:
        self._issue("scatter", lambda: self._copies.scatter(layer, blocks, staged))

    def _issue(self, kind: str, run: Callable[[], object]) -> None:
        self._streams.issue(Lane.COMPUTE, kind, run)
