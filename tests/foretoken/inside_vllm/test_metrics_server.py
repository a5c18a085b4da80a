"""The port with foretoken's metrics in vLLM's engine process."""

import urllib.request
from urllib.error import HTTPError, URLError

import pytest
from prometheus_client import CollectorRegistry, Counter

from foretoken.vllm.metrics.server import MetricsServer
from services.runtime.config import ConfigError

HOST = "127.0.0.1"


def read(port: int, path: str = "/metrics") -> str:
    with urllib.request.urlopen(f"http://{HOST}:{port}{path}", timeout=10) as answer:
        text: str = answer.read().decode()
        return text


def test_serves_the_registry_until_it_is_stopped() -> None:
    registry = CollectorRegistry()
    counted = Counter("foretoken_steps", "Steps.", registry=registry)
    server = MetricsServer(HOST, 0, registry)
    assert read(server.port).splitlines()[-1] == "foretoken_steps_total 0.0"
    counted.inc(3)
    assert read(server.port).splitlines()[-1] == "foretoken_steps_total 3.0"
    with pytest.raises(HTTPError, match="404"):
        read(server.port, "/")
    server.stop()
    with pytest.raises(URLError):
        read(server.port)


def test_a_port_in_use_is_refused_with_a_sentence() -> None:
    first = MetricsServer(HOST, 0, CollectorRegistry())
    try:
        with pytest.raises(ConfigError, match=f"cannot listen on {HOST}:{first.port} for metrics"):
            MetricsServer(HOST, first.port, CollectorRegistry())
    finally:
        first.stop()
