"""The gRPC server of all services: health, metrics, reflection, limits, and a two-stage stop."""

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
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from observability.exposition import Part
from protos.generated import telemetry_pb2_grpc
from services.runtime.config import ConfigError
from services.runtime.errors import ErrorInterceptor, OnInvalid
from services.runtime.health import HealthService
from services.runtime.network.authorisation import Authorisation
from services.runtime.network.channel import OPTIONS, is_loopback
from services.runtime.network.identity import LOOPBACK_ONLY, Identity, Protection
from services.runtime.telemetry.scrape import TELEMETRY, TelemetryService

log = logging.getLogger(__name__)

SERVER_OPTIONS: Sequence[tuple[str, Any]] = (
    # Clients send keep-alive pings every 20 s, and to several schedulers every second, even without
    # calls (channel.OPTIONS, leader_channel). The default would disconnect them.
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
)
HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
MAX_CONCURRENT_RPCS = 8_192  # of a server; further calls get RESOURCE_EXHAUSTED


@dataclass(frozen=True)
class Mount:
    """A servicer, its full name, the generated function that registers it, and interceptors that
    apply to all calls of the server. `on_invalid` is called for each invalid message to it."""

    name: str
    add: Callable[[Any, Any], None]
    servicer: Any
    interceptors: Sequence[aio.ServerInterceptor] = ()
    on_invalid: OnInvalid | None = None


@dataclass
class Lifecycle:
    """The first SIGTERM or SIGINT sets `draining`, the second one `aborting`."""

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

    async def drain(self, work: Awaitable[object], limit_s: float) -> bool:
        """Runs `work` until it ends, `limit_s`, or the second signal; returns whether it ended."""
        return await _ends_before(self.aborting, work, limit_s)

    async def prepare(self, work: Awaitable[None]) -> bool:
        """Runs `work` until it ends or the first signal; returns whether it ended."""
        return await _ends_before(self.draining, work)


async def _ends_before(
    event: asyncio.Event, work: Awaitable[object], limit_s: float | None = None
) -> bool:
    task, stop = asyncio.ensure_future(work), asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({task, stop}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        return task.done()
    finally:
        for pending in (task, stop):
            pending.cancel()
        await asyncio.gather(task, stop, return_exceptions=True)


class Server:
    """Serves mounts on one or several addresses. `parts` are the metrics of the process. `shared`:
    other processes may listen on the TCP port, too; without it, a port in use is an error."""

    def __init__(
        self,
        mounts: Sequence[Mount],
        parts: Sequence[Part] = (),
        interceptors: Sequence[aio.ServerInterceptor] = (),
        shared: bool = False,
        protection: Protection = LOOPBACK_ONLY,
    ):
        self._shared, self._protection = shared, protection
        identity = protection.identity if protection.mutual else None
        authorisation = [Authorisation(identity)] if identity else []
        first = [each for mount in mounts for each in mount.interceptors]
        errors = ErrorInterceptor({m.name: m.on_invalid for m in mounts if m.on_invalid})
        self._server = aio.server(
            interceptors=[*authorisation, *first, *interceptors, errors],
            options=[*OPTIONS, *SERVER_OPTIONS, ("grpc.so_reuseport", int(shared))],
            maximum_concurrent_rpcs=MAX_CONCURRENT_RPCS,
        )
        self._health = HealthService([mount.name for mount in mounts])
        for mount in mounts:
            mount.add(mount.servicer, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        telemetry_pb2_grpc.add_TelemetryServicer_to_server(TelemetryService(parts), self._server)
        names = [*(mount.name for mount in mounts), TELEMETRY, HEALTH, reflection.SERVICE_NAME]
        reflection.enable_server_reflection(names, self._server)
        self.port = 0

    async def start(self, *addresses: str) -> None:
        """Listens; the health status is NOT_SERVING. `port` is that of the last address. Raises
        ConfigError if an address is not available."""
        for address in addresses:
            _require_free(address, self._shared)
            try:
                self.port = self._listen(address)
            except RuntimeError:
                raise ConfigError(
                    f"cannot listen on {address}: it is in use or not an address of this host"
                ) from None
        # gRPC breaks if its start, which takes one turn of the loop, is cancelled.
        starting = asyncio.ensure_future(self._server.start())
        try:
            await asyncio.shield(starting)
        finally:
            await starting

    def _listen(self, address: str) -> int:
        """Returns the port. Raises ConfigError for an address that must not be open."""
        if address.startswith("unix:"):
            return self._server.add_insecure_port(address)
        identity, is_open = self._protection.identity, self._protection.open
        if isinstance(identity, Identity):
            credentials = identity.server_credentials(self._protection.mutual)
            return self._server.add_secure_port(address, credentials)
        if not (identity or is_open or is_loopback(address)):
            raise ConfigError(
                f"{address} is reachable from other machines, and nothing protects it: set "
                "tls.cert, tls.key and tls.ca (`foretoken certs` makes a set), tls.token_file in "
                "a mesh that encrypts, or tls.insecure=true on a network that you trust"
            )
        return self._server.add_insecure_port(address)

    def set_serving(self, serving: bool) -> None:
        """Sets the health status."""
        self._health.set_serving(serving)

    async def stop(self, grace_s: float) -> None:
        self._health.end_watches()
        await self._server.stop(grace_s)


@asynccontextmanager
async def listening(
    mounts: Sequence[Mount],
    address: str,
    parts: Sequence[Part] = (),
    interceptors: Sequence[aio.ServerInterceptor] = (),
    more_addresses: Sequence[str] = (),
    shared: bool = False,
    serving: bool = True,
    protection: Protection = LOOPBACK_ONLY,
) -> AsyncIterator[Server]:
    """A running server with this health status; stops at the end of the block without a drain."""
    server = Server(mounts, parts, interceptors, shared, protection)
    try:
        await server.start(*more_addresses, address)
        server.set_serving(serving)
        yield server
    finally:
        server.set_serving(False)
        await server.stop(grace_s=0.5)


def _require_free(address: str, shared: bool) -> None:
    """Raises ConfigError if the address is in use, unless its port is `shared`. gRPC would log
    several lines to stderr."""
    if address.startswith("unix:"):
        return _clear_stale_socket(Path(address.removeprefix("unix:")))
    host, _, port = address.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(shared))
        try:
            probe.bind((host.strip("[]"), int(port)))
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot listen on {address}: {error}") from None


def _clear_stale_socket(path: Path) -> None:
    """Removes the socket file of a killed process, which prevents binding. Raises ConfigError if a
    process listens on it."""
    if not path.exists():
        return
    with socket.socket(socket.AF_UNIX) as probe:
        if probe.connect_ex(str(path)) == 0:
            raise ConfigError(f"cannot listen on unix:{path}: another process listens on it")
    path.unlink(missing_ok=True)
