"""Finds free TCP ports for child services."""

import socket
from contextlib import ExitStack
from secrets import randbelow

from services.runtime.config import ConfigError

# Below the ephemeral range: an outgoing connection could take an ephemeral port before the service
# listens on it, and a client could connect to itself.
MIN_PORT, PORTS = 20_000, 12_000


def free_ports(count: int) -> list[int]:
    """Returns distinct free ports, adjacent where possible, starting at a random place.

    The random start keeps two concurrent searches apart. Raises ConfigError if none is free.
    """
    found: list[int] = []
    start = randbelow(PORTS)
    with ExitStack() as probes:
        for at in range(PORTS):
            port = MIN_PORT + (start + at) % PORTS
            probe = probes.enter_context(socket.socket())
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                probe.close()
                continue
            found.append(port)
            if len(found) == count:
                return found
    raise ConfigError(f"no ports are free from {MIN_PORT} to {MIN_PORT + PORTS - 1}")


def free_port() -> int:
    """Returns one free port."""
    [port] = free_ports(1)
    return port
