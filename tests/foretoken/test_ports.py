"""Free ports for child services."""

import socket

import pytest

from foretoken.running import ports
from foretoken.running.ports import MIN_PORT, PORTS, HeldPort, free_port, free_ports
from gateway.faces.http.serve import bind_http
from services.runtime.config import ConfigError
from services.runtime.network.channel import host_port

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


def listening_on(port: int, shared: bool) -> socket.socket:
    """A server's socket, as the gateway makes it. Raises ConfigError if the port is in use."""
    return bind_http("127.0.0.1", port, shared)


def test_held_port_is_open_to_its_gateways_only() -> None:
    with HeldPort("127.0.0.1", 0) as held:
        with pytest.raises(ConfigError, match="in use"):
            listening_on(held.number, shared=False)
        first, second = (listening_on(held.number, shared=True) for _ in range(2))
        refused = pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{held.number}: ")
        with first, second, refused:
            HeldPort("127.0.0.1", held.number)
        # The gateways are restarted; meanwhile no other server takes the port.
        with pytest.raises(ConfigError, match="in use"):
            HeldPort("127.0.0.1", held.number)
    listening_on(held.number, shared=False).close()


def test_held_port_never_takes_a_connection() -> None:
    with HeldPort("127.0.0.1", 0) as held:
        address = "127.0.0.1", held.number
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address, timeout=5)
        with listening_on(held.number, shared=True) as listener:
            for _ in range(32):
                with socket.create_connection(address, timeout=5):
                    accepted, _ = listener.accept()
                    accepted.close()


def test_port_of_an_ended_server_can_be_held_at_once() -> None:
    """Its connections are in TIME_WAIT, with the server as the closing side."""
    with listening_on(free_port(), shared=False) as listener:
        address = listener.getsockname()
        with socket.create_connection(address, timeout=5) as client:
            accepted, _ = listener.accept()
            accepted.close()
            assert client.recv(1) == b""
    HeldPort(*address).__exit__()


@pytest.mark.parametrize(("host", "reason"), [("192.0.2.1", "assign"), ("no.invalid", "")])
def test_unusable_host_is_reported(host: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"cannot listen on {host}:8000: .*{reason}"):
        HeldPort(host, 8000)


@pytest.mark.parametrize(
    ("host", "joined"), [("localhost", "localhost:8"), ("1.2.3.4", "1.2.3.4:8"), ("::1", "[::1]:8")]
)
def test_host_and_port_are_joined(host: str, joined: str) -> None:
    assert host_port(host, 8) == joined


def test_port_of_an_ipv6_address_is_held() -> None:
    with HeldPort("::1", 0) as held, pytest.raises(ConfigError, match="in use"):
        HeldPort("::1", held.number)
