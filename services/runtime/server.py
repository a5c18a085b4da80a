"""A gRPC server as all services run it: health, metrics, reflection, limits, a two-stage stop."""

import asyncio
import logging
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from observability.exposition import Part
from protos.generated import telemetry_pb2_grpc
from services.runtime.channel import OPTIONS
from services.runtime.config import ConfigError
from services.runtime.errors import ErrorInterceptor
from services.runtime.telemetry.scrape import TELEMETRY, TelemetryService

log = logging.getLogger(__name__)

DRAIN_S = 30.0  # time for running requests after the first SIGTERM; a second one stops at once
SERVER_OPTIONS: Sequence[tuple[str, Any]] = (
    ("grpc.so_reuseport", 0),  # a port in use must be an error
    # Our clients send keep-alive pings every 20 s, even without calls; by default that counts as
    # abuse.
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
)
MAX_CONCURRENT_RPCS = 8_192  # concurrent streams of a server; more get RESOURCE_EXHAUSTED


@dataclass(frozen=True)
class Mount:
    """A servicer, the generated function that registers it under its full name, and the
    interceptors of every call of its server."""

    name: str
    add: Callable[[Any, Any], None]
    servicer: Any
    interceptors: Sequence[aio.ServerInterceptor] = ()


@dataclass
class Lifecycle:
    """First SIGTERM or SIGINT: drain. Second: stop now. Tests set the events directly."""

    draining: asyncio.Event = field(default_factory=asyncio.Event)
    aborting: asyncio.Event = field(default_factory=asyncio.Event)
    number: int = signal.SIGTERM  # of the last signal

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.number = number
        (self.aborting if self.draining.is_set() else self.draining).set()
        self.draining.set()

    def install(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.signal, number)

    async def drain(self, work: Awaitable[None], limit_s: float) -> bool:
        """Waits for `work`, up to the limit or a second signal; returns whether it finished."""
        task = asyncio.ensure_future(work)
        abort = asyncio.ensure_future(self.aborting.wait())
        try:
            await asyncio.wait({task, abort}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            return task.done()
        finally:
            for pending in (task, abort):
                pending.cancel()
            await asyncio.gather(task, abort, return_exceptions=True)


class Server:
    """Serves mounts on its addresses. `set_serving` sets the health status; `parts` are the
    process's metrics."""

    def __init__(
        self,
        mounts: Sequence[Mount],
        parts: Sequence[Part] = (),
        interceptors: Sequence[aio.ServerInterceptor] = (),
    ):
        first = [each for mount in mounts for each in mount.interceptors]
        self._server = aio.server(
            interceptors=[*first, *interceptors, ErrorInterceptor()],
            options=[*OPTIONS, *SERVER_OPTIONS],
            maximum_concurrent_rpcs=MAX_CONCURRENT_RPCS,
        )
        self._names = [mount.name for mount in mounts]
        self._health = health.aio.HealthServicer()
        for mount in mounts:
            mount.add(mount.servicer, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        telemetry_pb2_grpc.add_TelemetryServicer_to_server(TelemetryService(parts), self._server)
        names = [*self._names, TELEMETRY, health.SERVICE_NAME, reflection.SERVICE_NAME]
        reflection.enable_server_reflection(names, self._server)
        self.port = 0

    async def start(self, *addresses: str) -> None:
        """Listens and reports healthy; `port` is that of the last address. Raises ConfigError if an
        address is not available."""
        for address in addresses:
            _require_free(address)
            try:
                self.port = self._server.add_insecure_port(address)
            except RuntimeError:
                raise ConfigError(f"cannot listen on {address}: it is in use or not ours") from None
        starting = asyncio.ensure_future(self._server.start())
        try:
            await asyncio.shield(starting)
        # gRPC breaks if it is cancelled or stopped during its start, which takes one turn of the
        # loop
        finally:
            await starting
        await self.set_serving(True)

    async def set_serving(self, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse
        now = status.SERVING if serving else status.NOT_SERVING
        for name in ["", *self._names]:
            await self._health.set(name, now)

    async def stop(self, grace_s: float) -> None:
        await self._server.stop(grace_s)


@asynccontextmanager
async def listening(
    mounts: Sequence[Mount],
    address: str,
    parts: Sequence[Part] = (),
    interceptors: Sequence[aio.ServerInterceptor] = (),
    beside: Sequence[str] = (),
) -> AsyncIterator[Server]:
    """A running server, on additional addresses, too; stops at once at the end of the block, after
    any drain by its owner."""
    server = Server(mounts, parts, interceptors)
    try:
        await server.start(*beside, address)
        yield server
    finally:
        await server.set_serving(False)
        await server.stop(grace_s=0.5)


def _require_free(address: str) -> None:
    """Raises ConfigError for an address in use: gRPC itself reports it verbosely on stderr."""
    if address.startswith("unix:"):
        return _clear_stale_socket(Path(address.removeprefix("unix:")))
    host, _, port = address.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), int(port)))
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot listen on {address}: {error}") from None


def _clear_stale_socket(path: Path) -> None:
    """Removes a socket file whose owner was killed, which would prevent binding; one that answers
    is in use."""
    if not path.exists():
        return
    with socket.socket(socket.AF_UNIX) as probe:
        if probe.connect_ex(str(path)) == 0:
            raise ConfigError(f"cannot listen on unix:{path}: another process does")
    path.unlink(missing_ok=True)
