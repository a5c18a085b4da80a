"""A channel to the scheduler that leads, among several addresses.

gRPC holds a connection and a health watch to each address, and sends calls to the one that is
SERVING: standbys are NOT_SERVING. Streams wait for one, so that they open as soon as it leads.
"""

import json
from collections.abc import Mapping
from ipaddress import ip_address
from typing import Annotated, Any

from pydantic import AfterValidator

from services.runtime.network.channel import OPTIONS, Options

SCHEDULER = "foretoken.v1.Scheduler"
DNS = "dns:"
_SERVICE_CONFIG: Mapping[str, Any] = {
    "loadBalancingConfig": [{"round_robin": {}}],  # the policy that heeds health
    "healthCheckConfig": {"serviceName": SCHEDULER},
    "methodConfig": [
        {
            "name": [{"service": SCHEDULER, "method": name} for name in ("Attach", "Submit")],
            "waitForReady": True,
        }
    ],
}
# A host that is lost without a reset is noticed within the sum of both times.
_KEEPALIVE: Options = (
    ("grpc.keepalive_time_ms", 1_000),
    ("grpc.http2.ping_timeout_ms", 1_500),
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
)


def leader_target(address: str) -> tuple[str, Options]:
    """Target and options of a channel to one address, or to the leader among several:
    `ip:port,ip:port`, or `dns:///name:port` for a name that resolves to all. Raises ValueError."""
    target = _target(address)
    if target == address and not address.startswith(DNS):
        return target, OPTIONS
    options = dict(OPTIONS) | dict(_KEEPALIVE)
    options["grpc.service_config"] = json.dumps(_SERVICE_CONFIG)
    return target, list(options.items())


def _target(address: str) -> str:
    """The target of a channel: `ipv4:` or `ipv6:` and the list, or the single address itself."""
    addresses = [part.strip() for part in address.split(",")]
    if len(addresses) == 1:
        return address
    try:
        [version] = {ip_address(each.rpartition(":")[0].strip("[]")).version for each in addresses}
    except ValueError:
        raise ValueError(
            "several addresses must be ip:port of one version, such as 10.0.0.1:50052,"
            "10.0.0.2:50052; write names as one name that resolves to all: dns:///name:port"
        ) from None
    return f"ipv{version}:{','.join(addresses)}"


def _check(address: str) -> str:
    _target(address)
    return address


# One address, or several of schedulers of which one leads.
LeaderAddress = Annotated[str, AfterValidator(_check)]
