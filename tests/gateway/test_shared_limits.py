"""Settings of the gateway that several processes share."""

import pytest

from gateway.config import GatewayConfig


@pytest.mark.parametrize(
    ("replicas", "sessions", "connections"),
    [(0, 10, 8192), (1, 10, 8192), (3, 4, 2731), (64, 1, 128)],
)
def test_gateways_divide_the_limits_of_a_server(
    replicas: int, sessions: int, connections: int
) -> None:
    config = GatewayConfig(replicas=replicas, max_sessions=10, max_queued=7)
    own = config.own_share()
    assert (own.max_sessions, own.max_connections) == (sessions, connections)
    assert own.retry_floor_per_s == config.retry_floor_per_s / max(1, replicas)
    assert own.max_queued == 7  # of the scheduler, which all gateways see
    assert config.max_sessions == 10
    assert config.shares_address is (replicas > 0)
