"""Ports for what is started here."""

import socket


def free_port() -> int:
    """A port nobody has at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
