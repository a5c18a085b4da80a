"""The gRPC health service (grpc.health.v1) of a server."""

import asyncio
from collections.abc import AsyncIterator, Collection
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.runtime.errors import Code, ServiceError

Response = health_pb2.HealthCheckResponse


class HealthService(health_pb2_grpc.HealthServicer):
    """One status for the server (the empty name) and its services. Unlike grpc_health's own
    servicer, it is an async generator, which the error guard expects, and its watches end with the
    server."""

    def __init__(self, names: Collection[str]):
        self._names = frozenset(("", *names))
        self._serving = self._ended = False
        self._changed = asyncio.Event()

    def set_serving(self, serving: bool) -> None:
        self._serving = serving
        self._notify()

    def end_watches(self) -> None:
        self._ended = True
        self._notify()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Any) -> Response:
        if request.service not in self._names:
            raise ServiceError(Code.NOT_FOUND, f"no service {request.service!r} on this server")
        return Response(status=self._status(request.service))

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: Any
    ) -> AsyncIterator[Response]:
        sent: int | None = None
        while not self._ended:
            changed, status = self._changed, self._status(request.service)
            if status != sent:
                yield Response(status=status)
                sent = status
            else:
                await changed.wait()

    def _status(self, service: str) -> Any:
        if service not in self._names:
            return Response.SERVICE_UNKNOWN
        return Response.SERVING if self._serving else Response.NOT_SERVING

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
