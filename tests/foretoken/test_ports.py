"""Free ports for child services."""

import socket

import pytest

from foretoken.running import ports
from foretoken.running.ports import MIN_PORT, PORTS, free_port, free_ports
from services.runtime.config import ConfigError

FIRST_EPHEMERAL_PORT = 32_768  # of Linux; other systems begin above it


def test_free_ports_are_distinct_and_usable() -> None:
    found = free_ports(50)
    assert len(set(found)) == 50
    listening = [socket.create_server(("127.0.0.1", port)) for port in found]
    try:
        assert not set(free_ports(50)) & set(found)
    finally:
        for each in listening:
            each.close()


def test_free_ports_are_below_the_ephemeral_range() -> None:
    assert MIN_PORT >= 1_024 and max(free_ports(50)) < MIN_PORT + PORTS <= FIRST_EPHEMERAL_PORT


def test_free_ports_report_exhaustion(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", free_port())) as taken:
        monkeypatch.setattr(ports, "MIN_PORT", taken.getsockname()[1])
        monkeypatch.setattr(ports, "PORTS", 1)
        with pytest.raises(ConfigError, match=r"no ports are free from \d+ to \d+"):
            free_port()
