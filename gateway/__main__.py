"""`python -m gateway`: config → objects → serve gRPC and HTTP."""

import asyncio

from prometheus_client import CollectorRegistry

from gateway.config import GatewayConfig
from gateway.http.app import build_app
from gateway.http.serve import bind_http, serve_http
from gateway.service import GatewayService
from services.runtime.channel import connect
from services.runtime.main import Unit, run_service


def build(config: GatewayConfig, registry: CollectorRegistry) -> Unit:
    gateway = GatewayService(config, connect(config.scheduler_address), connect, registry)
    app = build_app(gateway)
    listener = bind_http(config.host, config.http_port)

    async def run() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(gateway.run())
            group.create_task(serve_http(app, listener))

    return Unit([gateway.mount()], run, gateway.drain)


if __name__ == "__main__":
    run_service(GatewayConfig, build)
