"""Ports for what is started here."""

import socket
from contextlib import ExitStack
from secrets import randbelow

from services.runtime.config import ConfigError

# Below those that systems give to connections on their way out: one of these could have a port
# before it is listened on, and who calls one where nobody listens could be connected with itself.
LOWEST, PORTS = 20_000, 12_000


def free_ports(count: int) -> list[int]:
    """So many different ones that nobody has at this moment. They lie side by side, where they can:
    two who look at the same time seldom find the same. Raises ConfigError where there are none."""
    found: list[int] = []
    start = randbelow(PORTS)
    with ExitStack() as probes:
        for at in range(PORTS):
            port = LOWEST + (start + at) % PORTS
            probe = probes.enter_context(socket.socket())
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                probe.close()
                continue
            found.append(port)
            if len(found) == count:
                return found
    raise ConfigError(f"no ports are free from {LOWEST} to {LOWEST + PORTS - 1}")


def free_port() -> int:
    """One that nobody has at this moment."""
    [port] = free_ports(1)
    return port
