"""`python -m gateway`: config → objects → serve gRPC and HTTP."""

import asyncio
from functools import partial

from prometheus_client import CollectorRegistry

from gateway.config import GatewayConfig
from gateway.faces.app import build_app
from gateway.faces.grpc.service import mount
from gateway.faces.http.batches.runner import run_batches
from gateway.faces.http.serve import bind_http, serve_http
from gateway.front import Front
from observability.tracing import Tracing
from services.runtime.main import Unit, run_service
from services.runtime.network.connector import Connector
from services.runtime.network.identity import Role

# How long requests are still answered that arrive over connections about to close.
LAST_REQUESTS_S = 1.0


def build(
    config: GatewayConfig, _: CollectorRegistry, tracing: Tracing, connector: Connector
) -> Unit:
    """Each model has a registry of its own, for its labels, and the process has none."""
    config = config.own_share()
    spans = tracing.service(config.section)
    front = Front(
        config,
        connector.connect_to_leader,
        partial(connector.connect, role=Role.WORKER),
        connector.connect_to_peer,
        spans=spans,
    )
    app = build_app(front)
    listener = bind_http(config.host, config.http_port, config.shares_address)
    leaves = asyncio.Event()

    async def run() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(front.run())
            group.create_task(serve_http(app, listener, config, leaves))
            group.create_task(run_batches(front))

    async def drain() -> None:
        if config.hands_over:
            leaves.set()
            await asyncio.sleep(LAST_REQUESTS_S)
        await front.drain()

    return Unit([mount(front)], run, drain, cycle_free=True, parts=front.parts)


if __name__ == "__main__":
    run_service(GatewayConfig, build)
