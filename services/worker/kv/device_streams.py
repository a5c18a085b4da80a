"""Streams: the compute and copy lanes of a device, the events that order them, and `to_device`."""

from dataclasses import dataclass
from enum import Enum, auto
from time import perf_counter
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Lane(Enum):
    """`COMPUTE` is the engine's current stream; `COPY` transfers to and from the host."""

    COMPUTE = auto()
    COPY = auto()


class Event(Protocol):
    """A point in a lane. It has passed once all work issued before it is done."""

    def query(self) -> bool:
        """Whether it has passed; does not wait."""

    def synchronize(self) -> None:
        """Blocks until it has passed."""


class Streams(Protocol):
    """Each lane runs in order; only `wait`, or a passed event, orders one after the other.

    Tensors given to `copy` must outlive it: the allocator does not track the copy lane, so
    freed memory may be reused before the copy is done.
    """

    def copy(self, into: Tensor, source: Tensor) -> None:
        """Issues a copy on the copy lane. Both contiguous, host memory pinned on CUDA."""

    def record(self, lane: Lane) -> Event:
        """Returns an event after all work issued on `lane`."""

    def wait(self, lane: Lane, event: Event) -> None:
        """Orders later work on `lane` after `event`. Returns at once."""

    def elapsed_s(self, start: Event, end: Event) -> float:
        """Returns the seconds between two passed events of one lane."""


class CudaStreams:
    """Compute is the calling thread's current stream; copies run on a dedicated stream.

    torch.cuda.Stream does not synchronize with the default stream, so these events are the
    only ordering.
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
    """An event on a device without asynchronous work: it has always passed."""

    at_s: float

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class ImmediateStreams:
    """CPU lanes: work completes when issued."""

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
    """Returns a copy for the compute lane without blocking. On a CPU it shares the array.

    A copy from pageable memory would wait for the running step. PyTorch does not reuse freed pinned
    memory before copies issued from it are done. `kernels.cuda.device.send` copies several arrays.
    """
    here = torch.from_numpy(array)
    if device.type == "cuda":
        here = here.pin_memory()
    return here.to(device, non_blocking=True)
