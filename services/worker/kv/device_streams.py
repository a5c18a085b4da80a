"""Streams: the two queues of work on a device, and the events that order one after the other; and
the way of the host's numbers to its compute."""

from dataclasses import dataclass
from enum import Enum, auto
from time import perf_counter
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Lane(Enum):
    """`COMPUTE` is whatever stream the engine computes on; `COPY` copies to and from the host."""

    COMPUTE = auto()
    COPY = auto()


class Event(Protocol):
    """A point in a lane. It has passed once all that was issued there before it is done."""

    def query(self) -> bool:
        """Whether it has passed, without waiting."""

    def synchronize(self) -> None:
        """Return once it has passed."""


class Streams(Protocol):
    """Each lane is in order; nothing orders one after the other but `wait` and an event seen
    to have passed.

    Compute is issued by calling it. The tensors of `copy` must outlive it: no allocator knows
    of the copy lane, so memory that is freed may have a new owner before the copy is done.
    """

    def copy(self, into: Tensor, source: Tensor) -> None:
        """Issue a copy on the copy lane; both contiguous, the host's side pinned on CUDA."""

    def record(self, lane: Lane) -> Event:
        """An event after all that was issued on `lane`."""

    def wait(self, lane: Lane, event: Event) -> None:
        """Nothing issued on `lane` from now on runs before `event` has passed. Returns at once."""

    def elapsed_s(self, start: Event, end: Event) -> float:
        """Between two events of one lane that have passed."""


class CudaStreams:
    """Compute is the calling thread's current stream, copies run on one of their own.

    torch.cuda.Stream does not synchronize with the default stream, so the events here are all
    the ordering there is.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._copy = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # no types

    def copy(self, into: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self._copy):
            into.copy_(source, non_blocking=True)

    def record(self, lane: Lane) -> Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # no types
        event.record(self._stream(lane))
        return event

    def wait(self, lane: Lane, event: Event) -> None:
        self._stream(lane).wait_event(_cuda(event))

    def elapsed_s(self, start: Event, end: Event) -> float:
        return float(_cuda(start).elapsed_time(_cuda(end))) / 1000

    def _stream(self, lane: Lane) -> torch.cuda.Stream:
        return self._copy if lane is Lane.COPY else torch.cuda.current_stream(self._device)


def _cuda(event: Event) -> torch.cuda.Event:
    assert isinstance(event, torch.cuda.Event), "an event of other streams"
    return event


@dataclass(frozen=True, slots=True)
class Instant:
    """An event where everything is done when it is issued: it has passed already."""

    at_s: float

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class ImmediateStreams:
    """The CPU: one thread, so both lanes are done with whatever they were given."""

    def copy(self, into: Tensor, source: Tensor) -> None:
        into.copy_(source)

    def record(self, lane: Lane) -> Event:
        return Instant(perf_counter())

    def wait(self, lane: Lane, event: Event) -> None:
        pass

    def elapsed_s(self, start: Event, end: Event) -> float:
        assert isinstance(start, Instant) and isinstance(end, Instant), "events of other streams"
        return end.at_s - start.at_s


def streams_for(device: torch.device) -> Streams:
    return CudaStreams(device) if device.type == "cuda" else ImmediateStreams()


def to_device(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """A copy for use on the compute lane that waits for nothing. On a CPU it is the array itself.

    From pageable memory it would wait for the step that is computed there. Pinned memory that is
    given up is not handed out again before the copies that were issued from it are done.
    `kernels.cuda.device.send` is of several arrays at once.
    """
    here = torch.from_numpy(array)
    if device.type == "cuda":
        here = here.pin_memory()
    return here.to(device, non_blocking=True)
