"""Runs the OpenAI API with uvicorn on the caller's event loop."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from functools import partial
from typing import cast

import uvicorn
from starlette.types import ASGIApp

from gateway.config import GatewayConfig
from gateway.faces.http.protocol import BoundedProtocol, ClientConnections
from services.runtime.config import ConfigError
from services.runtime.process_limits import open_file_limit
from services.runtime.tasks import background

log = logging.getLogger(__name__)

BACKLOG = 1024
GRACE_S = 1  # for open connections on shutdown; requests are drained before


class _Server(uvicorn.Server):
    """uvicorn without signal handlers: the process' Lifecycle handles signals."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind_http(host: str, port: int, shared: bool = False) -> socket.socket:
    """A listening socket, so that its port is known before the server starts. `shared`: other
    processes may listen on the port, too. Raises ConfigError if the address is in use."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY on connections with a named protocol only.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        reason = error.strerror or "unknown host"
        raise ConfigError(f"cannot listen on {host}:{port} for HTTP: {reason}") from None
    listener.setblocking(False)
    return listener


async def serve_http(
    app: ASGIApp,
    listener: socket.socket,
    config: GatewayConfig | None = None,
    leaves: asyncio.Event | None = None,
) -> None:
    """Serves on a socket of `bind_http` until cancelled, then closes open connections. Uses the
    connection limits of the config only. From `leaves` on it accepts no connection, and closes
    each open one at the end of its request."""
    limits = config or GatewayConfig()
    _check_open_files(limits.max_connections)
    connection = partial(
        BoundedProtocol,
        max_connections=limits.max_connections,
        clients=ClientConnections(limits.max_client_connections),
        max_header_bytes=limits.max_header_bytes,
        header_wait_s=limits.header_wait_s,
        stall_s=limits.client_stall_s,
    )
    server = _Server(
        uvicorn.Config(
            app,
            log_config=None,
            log_level="warning",
            access_log=False,
            lifespan="off",
            server_header=False,
            http=cast(type[asyncio.Protocol], connection),
            ws="none",
            timeout_keep_alive=limits.keep_alive_s,
            timeout_graceful_shutdown=GRACE_S,
        )
    )
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    try:
        async with background(_leave(server, leaves)) if leaves else nullcontext():
            await asyncio.wait({serving})
    finally:
        server.should_exit = True
        await asyncio.gather(serving, return_exceptions=True)
        listener.close()


async def _leave(server: uvicorn.Server, leaves: asyncio.Event) -> None:
    await leaves.wait()
    if server.started:  # it has no listeners before
        for each in server.servers:
            each.close()
    for connection in list(server.server_state.connections):
        connection.shutdown()


def _check_open_files(connections: int) -> None:
    allowed = open_file_limit()
    if allowed < connections:
        log.warning(
            "the process may open %d files, fewer than gateway.max_connections=%d; raise the limit "
            "(ulimit -n), or some connections wait without an answer",
            allowed, connections,
        )  # fmt: skip


@asynccontextmanager
async def serving_http(
    app: ASGIApp, host: str, port: int, config: GatewayConfig | None = None
) -> AsyncIterator[int]:
    """Serves HTTP while the block runs; yields the port. Raises ConfigError if it is in use."""
    listener = bind_http(host, port)
    async with background(serve_http(app, listener, config)):
        yield listener.getsockname()[1]
