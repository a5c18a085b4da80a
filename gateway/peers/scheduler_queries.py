"""Unary calls to the scheduler: the story of a request, the fleet, and adapters."""

from collections.abc import Iterator
from contextlib import contextmanager

from grpc import aio

from protos.generated import scheduler_pb2
from protos.generated.scheduler_pb2_grpc import SchedulerStub
from services.runtime.errors import ServiceError
from services.runtime.telemetry.tracing import trace_metadata

WHY_TIMEOUT_S = 10.0
FLEET_TIMEOUT_S = 2.0
ADAPTER_TIMEOUT_S = 600.0  # the scheduler's own limit is shorter


class SchedulerQueries:
    """Raises the scheduler's errors as ServiceError."""

    def __init__(self, channel: aio.Channel):
        self._stub = SchedulerStub(channel)

    async def get_stories(self, request_id: str) -> scheduler_pb2.WhyResponse:
        """The stories of a request by any of its ids."""
        request = scheduler_pb2.WhyRequest(request_id=request_id)
        with _service_errors():
            return await self._stub.Why(request, timeout=WHY_TIMEOUT_S, metadata=trace_metadata())

    async def get_fleet(self) -> scheduler_pb2.FleetView:
        """Workers and queue as of now. The Submit stream reports them only when they affect
        requests."""
        with _service_errors():
            request = scheduler_pb2.GetFleetRequest()
            return await self._stub.GetFleet(request, timeout=FLEET_TIMEOUT_S)

    async def load_adapter(self, model: str, name: str, path: str) -> None:
        """Returns once all workers of the model hold the adapter."""
        with _service_errors():
            adapter = scheduler_pb2.Adapter(model=model, name=name, path=path)
            await self._stub.LoadAdapter(adapter, timeout=ADAPTER_TIMEOUT_S)

    async def unload_adapter(self, model: str, name: str) -> None:
        """Returns once no worker of the model accepts requests with the adapter."""
        with _service_errors():
            adapter = scheduler_pb2.Adapter(model=model, name=name)
            await self._stub.UnloadAdapter(adapter, timeout=ADAPTER_TIMEOUT_S)


@contextmanager
def _service_errors() -> Iterator[None]:
    try:
        yield
    except aio.AioRpcError as error:
        raise ServiceError(error.code(), error.details() or error.code().name) from None
