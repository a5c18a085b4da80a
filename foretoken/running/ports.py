"""Finds free TCP ports for child services, and holds the ports that several of them share."""

import socket
from contextlib import ExitStack
from secrets import randbelow
from typing import Self

from services.runtime.config import ConfigError

# Below the ephemeral range: an outgoing connection could take an ephemeral port before the service
# listens on it, and a client could connect to itself.
MIN_PORT, PORTS = 20_000, 12_000


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Returns distinct free ports of an address, adjacent where possible, from a random place on.

    The random start keeps two concurrent searches apart. Raises ConfigError if none is free.
    """
    found: list[int] = []
    start = randbelow(PORTS)
    with ExitStack() as probes:
        for at in range(PORTS):
            port = MIN_PORT + (start + at) % PORTS
            probe = probes.enter_context(socket.socket())
            try:
                probe.bind((host, port))
            except OSError:
                probe.close()
                continue
            found.append(port)
            if len(found) == count:
                return found
    raise ConfigError(f"no ports are free from {MIN_PORT} to {MIN_PORT + PORTS - 1}")


def free_port(host: str = "127.0.0.1") -> int:
    """Returns one free port of an address."""
    [port] = free_ports(1, host)
    return port


class HeldPort:
    """Keeps a port while the block runs, for processes that listen on it with SO_REUSEPORT.

    The port is neither taken by another program nor, while no process listens, refused to the
    next one. The socket of this object never listens, so it receives no connection.
    """

    def __init__(self, host: str, number: int):
        """`number` 0: any free port. Raises ConfigError if another program uses the port."""
        self._socket = _bind_alone(host, number or free_port())
        self.number: int = self._socket.getsockname()[1]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._socket.close()


def _bind_alone(host: str, port: int) -> socket.socket:
    """Two servers must not share a port by mistake: the first bind fails if anything has it."""
    with _socket_for(host) as probe:
        _bind(probe, host, port)
    return _bind_shared(host, port)


def _bind_shared(host: str, port: int) -> socket.socket:
    held = _socket_for(host)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    _bind(held, host, port)
    # Closed connections of an earlier server must not prevent the bind. From now on a bind without
    # SO_REUSEPORT fails.
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    return held


def _socket_for(host: str) -> socket.socket:
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return made


def _bind(unbound: socket.socket, host: str, port: int) -> None:
    try:
        unbound.bind((host, port))
    except OSError as error:
        unbound.close()
        reason = error.strerror or "unknown host"
        raise ConfigError(f"cannot listen on {host}:{port}: {reason}") from None
