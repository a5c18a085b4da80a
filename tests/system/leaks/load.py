"""The system that the endings are sent to, and the wait until it is idle."""

import asyncio
import json
import time
from collections.abc import Mapping

from foretoken.running.embedded import Endpoints
from foretoken.running.options import ServeOptions
from gateway.types.api_keys import name_keys
from tests.system.leaks.endings import KEY, LIMITED_KEY
from tests.system.leaks.resources import count_resources, differences

AT_A_TIME = 16
IDLE_S = 30.0  # in which a system without requests must be idle
LIMITS = {name_keys([LIMITED_KEY])[0].name: {"requests_per_minute": 1, "tokens_per_minute": 1}}
OPTIONS = ServeOptions(
    http_port=0,
    grpc_port=0,
    sets=(
        f"gateway.api_keys={json.dumps([KEY, LIMITED_KEY])}",
        f"gateway.key_limits={json.dumps(LIMITS)}",
    ),
)


def address_of(system: Endpoints) -> tuple[str, int]:
    host, port = system.http.removeprefix("http://").split(":")
    return host, int(port)


async def settled_differences(system: Endpoints, before: Mapping[str, float]) -> Mapping[str, str]:
    """The counts that differ from `before` and stay so. Closed connections, reports of workers and
    outcomes of the predictor take a moment."""
    until_s = time.monotonic() + IDLE_S
    while different := differences(before, await count_resources(system)):
        if time.monotonic() > until_s:
            break
        await asyncio.sleep(0.25)
    return different


async def count_idle(system: Endpoints) -> dict[str, float]:
    """The counts once they have been the same for a second."""
    counts = await count_resources(system)
    until_s = time.monotonic() + IDLE_S
    while time.monotonic() < until_s:
        await asyncio.sleep(1.0)
        earlier, counts = counts, await count_resources(system)
        if counts == earlier:
            break
    return counts
