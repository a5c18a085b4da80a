"""What advice is given, and what it needs of the service it belongs to."""

from collections.abc import Sequence
from typing import Protocol

import grpc
from grpc import aio

from services.core import Request
from services.scheduler.core import events as ev
from services.scheduler.observe.metrics import SchedulerMetrics

MOST_PER_CALL = 1_024  # what one Forecast or Observe message carries
MOST_KEPT = 65_536  # texts, questions, outcomes kept for a service that is away


class World(Protocol):
    """What the state says to advice."""

    def shared_representatives(self) -> Sequence[Request]:
        """One live request for each population forecast in use."""
        ...


class Owner(Protocol):
    """The service that asks, and takes the answers."""

    @property
    def state(self) -> World: ...

    @property
    def metrics(self) -> SchedulerMetrics: ...

    def dispatch(self, event: ev.Event) -> None: ...


def sentence(error: Exception) -> str:
    """What went wrong with a call, for the log."""
    if isinstance(error, aio.AioRpcError):
        code: grpc.StatusCode = error.code()
        return f"{code.name}: {error.details()}"
    return str(error)
